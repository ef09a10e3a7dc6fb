"""Limits for the structure: files that a public function reaches, levels of folders, names that are defined twice.

Each figure may fall, and this file then holds the lower one. It may rise only with a reason in the commit that does it.
"""

import ast
import functools
import statistics
from collections import Counter
from collections.abc import Iterator

import pytest

import mcore_bridge
from tests.support.house import MODULES, PACKAGE, import_graph, module_of

REACHED = {
    "load_hf_weights": 56,
    "iter_hf_weights": 80,
    "build_model": 137,
    "save_hf_checkpoint": 91,
    "add_adapters": 70,
    "forward": 62,
    "map_engine": 20,
}
"""Public functions, and the files that a reader passes who follows each name that is used on the way."""
ROOMS, FLOORS = {"weights": 23, "factory": 16}, {"weights": 11, "factory": 7}
SMALL, SMALL_FILES, FILES, MEDIAN = 45, 12, 458, 125
TWICE = {"classes": 1, "files": 1}
LONG, MANY = 60, 12


@functools.cache
def trees() -> dict[str, ast.Module]:
    return {module_of(path): ast.parse(path.read_text()) for path in MODULES}


@functools.cache
def definitions(module: str) -> dict[str, ast.stmt]:
    """Functions, classes and constants at the top of a module."""
    found: dict[str, ast.stmt] = {}
    for node in trees()[module].body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found.update({name.id: node for each in targets for name in ast.walk(each) if isinstance(name, ast.Name)})
    return found


@functools.cache
def imported(module: str) -> dict[str, tuple[str, str]]:
    """Names that a module imports of ours, at any depth, each with its home and its name there."""
    found = {}
    for node in ast.walk(trees()[module]):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mcore_bridge"):
            home = (node.module or "").partition(".")[2].replace(".", "/")
            for alias in node.names:
                below = f"{home}/{alias.name}".strip("/")
                found[alias.asname or alias.name] = (below, "") if below in trees() else (home, alias.name)
    return found


def uses(module: str, node: ast.AST) -> Iterator[tuple[str, str]]:
    """Our functions, classes and constants that a definition names."""
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            if each.id in imported(module):
                yield imported(module)[each.id]
            elif each.id in definitions(module):
                yield module, each.id
        elif isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name):
            home, name = imported(module).get(each.value.id, ("", "-"))
            if not name:
                yield home, each.attr


def reached(function: str) -> set[str]:
    """The files that hold what a public function uses, and what that uses."""
    start = (mcore_bridge._HOMES[function].replace(".", "/"), function)
    seen, waiting = {start}, [start]
    while waiting:
        module, name = waiting.pop()
        node = definitions(module).get(name)
        new = set() if node is None else set(uses(module, node)) - seen
        seen |= new
        waiting.extend(new)
    return {module for module, name in seen if name in definitions(module)}


def rooms(folder: str) -> dict[str, set[str]]:
    """The files and folders of a folder, each with the files and folders of this folder that it imports."""

    def room(module: str) -> str:
        return module.removeprefix(f"{folder}/").split("/")[0]

    inside = {module: targets for module, targets in import_graph().items() if module.startswith(f"{folder}/")}
    merged: dict[str, set[str]] = {}
    for module, targets in inside.items():
        merged.setdefault(room(module), set()).update({room(each) for each in targets if each in inside})
    return {name: targets - {name} for name, targets in merged.items()}


def floors(graph: dict[str, set[str]]) -> int:
    """Rooms on the longest way down."""

    @functools.cache
    def height(name: str) -> int:
        return 1 + max(map(height, graph[name]), default=0)

    return max(map(height, graph))


def twice(names: Iterator[str]) -> list[str]:
    return sorted(name for name, count in Counter(names).items() if count > 1)


@pytest.mark.parametrize("function", REACHED)
def test_a_reader_of_a_public_function_passes_few_files(function: str) -> None:
    files = sorted(reached(function))
    print(f"{function}: {len(files)} files: {' '.join(files)}")
    assert len(files) <= REACHED[function]


@pytest.mark.parametrize("folder", ROOMS)
def test_a_folder_has_few_rooms_and_floors(folder: str) -> None:
    graph = rooms(folder)
    print(f"{folder}: {len(graph)} rooms on {floors(graph)} floors")
    assert len(graph) <= ROOMS[folder]
    assert floors(graph) <= FLOORS[folder]


def test_names_stand_once() -> None:
    classes = twice(node.name for tree in trees().values() for node in tree.body if isinstance(node, ast.ClassDef))
    files = twice(path.stem for path in MODULES if path.stem != "__init__")
    print(f"classes: {classes}; files: {files}")
    assert len(classes) <= TWICE["classes"]
    assert len(files) <= TWICE["files"]


def test_files_are_neither_many_nor_small() -> None:
    lines = {
        str(path.relative_to(PACKAGE)): len(path.read_text().splitlines())
        for path in MODULES
        if path.stem != "__init__"
    }
    small = sorted(name for name, count in lines.items() if count < SMALL and not name.startswith("models/"))
    print(f"{len(lines)} files, median {statistics.median(lines.values())}; under {SMALL} lines: {small}")
    assert len(lines) <= FILES
    assert len(small) <= SMALL_FILES
    assert statistics.median(lines.values()) >= MEDIAN


def test_functions_are_short_and_take_little() -> None:
    """Statements count, and docstrings do not. Commands have an argument for each option, four functions their own,
    and a kernel each constant.
    """
    long, many = [], []
    for module, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
                last = node.end_lineno or 0
                if last - first.lineno + 1 > LONG:
                    long.append(f"{module}.{node.name}")
                if len([*node.args.args, *node.args.kwonlyargs]) > MANY and not module.startswith("commands/"):
                    many.append(f"{module}.{node.name}")
    assert long == []
    assert many == [
        "batches/forward.forward",
        "convert/convert.convert",
        "factory/add_adapters.add_adapters",
        "factory/build.build_model",
        "weights/save.save_hf_checkpoint",
        "weights/sent/triton_encode.encode",
    ]


def test_the_way_of_a_function_would_be_seen() -> None:
    assert {"weights/export", "weights/agreement", "weights/bound", "rules/layout"} <= reached("iter_hf_weights")
    assert floors({"a": {"b"}, "b": {"c"}, "c": set(), "d": {"c"}}) == 3
    assert twice(iter("abca")) == ["a"]
