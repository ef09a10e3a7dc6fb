"""Mutants: cosmic-ray's operators list the places where each can be applied, and a seed draws from these places."""

import ast
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import parso
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from parso.tree import NodeOrLeaf

WITH_ARGUMENTS = ("VariableReplacer", "VariableInserter")
DECLARE = ("abstractmethod", "cache", "contextmanager", "dataclass", "field", "lru_cache", "overload")


@dataclass(frozen=True)
class Mutant:
    """One change to one file."""

    file: str
    line: int
    operator: str
    occurrence: int

    def code(self, source: str) -> str:
        """The file with the change."""
        return mutate_code(source, get_operator(self.operator)(), self.occurrence)


def drawn(root: Path, files: Mapping[str, set[int] | None], count: int, seed: int) -> list[Mutant]:
    """Draw ``count`` places at random in the given lines of each file (in all lines for None), and one mutant of each.

    So an operator with many mutants does not weigh more than others.
    """
    places: dict[tuple[str, int, int], list[Mutant]] = {}
    sources = {file: (root / file).read_text() for file in sorted(files)}
    for file, source in sources.items():
        lines = files[file]
        for place, mutant in mutants_of(file, source):
            if lines is None or mutant.line in lines:
                places.setdefault((file, *place), []).append(mutant)
    chance, found = random.Random(seed), list[Mutant]()
    for place in chance.sample(sorted(places), len(places)):
        mutant = chance.choice(places[place])
        if len(found) < count and is_python(mutant, sources[mutant.file]):
            found.append(mutant)
    return found


def is_python(mutant: Mutant, source: str) -> bool:
    """Whether a mutant is valid Python. Operators also change signs that are not arithmetic, such as two stars before
    arguments.

    The operator for exceptions fails at a name with a dot.
    """
    try:
        ast.parse(mutant.code(source))
    except (AttributeError, SyntaxError):
        return False
    return True


def mutants_of(file: str, source: str) -> Iterator[tuple[tuple[int, int], Mutant]]:
    """All mutants of a file with their places, except mutants that change nothing by construction."""
    operators = [(name, get_operator(name)()) for name in operator_names() if not name.endswith(WITH_ARGUMENTS)]
    counts = dict.fromkeys((name for name, _ in operators), 0)
    for node in nodes(parso.parse(source)):
        left_out = changes_nothing(node)
        for name, operator in operators:
            for start, _ in operator.mutation_positions(node):
                if not left_out:
                    yield start, Mutant(file, start[0], name, counts[name])
                counts[name] += 1


def nodes(node: NodeOrLeaf) -> Iterator[NodeOrLeaf]:
    """Yield the nodes in the order in which cosmic-ray visits them."""
    yield node
    for child in getattr(node, "children", ()):
        yield from nodes(child)


def changes_nothing(node: NodeOrLeaf) -> bool:
    """Whether no test can find a mutant of this node, or none needs to:

    - annotations, names for unions of types, and code under ``if TYPE_CHECKING``;
    - decorators that declare, their arguments and arguments of ``field``: code works without ``frozen`` or a cache;
    - ``strict=`` of ``zip``, which checks a fact that always holds;
    - the star after which parameters are passed by name.
    """
    while (parent := node.parent) is not None:
        kind = parent.type
        if kind == "annassign" and node is parent.children[1]:
            return True
        if kind == "tfpdef" and node is not parent.children[0]:
            return True
        if kind == "funcdef" and node is parent.annotation:
            return True
        if kind == "parameters" or (kind == "argument" and parent.children[0].get_code().strip() == "strict"):
            return node.type in ("operator", "keyword")
        if kind == "trailer" and parent.parent.children[0].get_code().strip() == "field":
            return True
        if node.type == "decorator":
            return node.get_code().strip().strip("@").partition("(")[0].split(".")[-1].strip() in DECLARE
        if any(each.type == "if_stmt" and "TYPE_CHECKING:" in each.get_code() for each in (node, parent)):
            return True
        if kind == "expr" and node.type == "operator" and node.value == "|":
            statement = parent.search_ancestor("expr_stmt")
            if statement is not None and statement.parent.parent.type == "file_input":
                return True
        node = parent
    return False
