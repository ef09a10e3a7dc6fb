"""An extension of Sphinx for the types in signatures.

The directive ``type-aliases`` describes names of types as the code defines them, each with its value and its meaning.
A type in a signature links to its description, wherever in the package the code defines it.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import make_refnode

ROOT = Path(__file__).parent.parent.parent


def alias(path: str) -> tuple[str, str]:
    """The value of an alias such as ``mcore_bridge.rules.mapping.ExpertFormat`` as code, and the text below it."""
    module, _, name = path.rpartition(".")
    body = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text()).body
    for node, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value and name in _names(node):
            value = ast.unparse(node.value).replace("'os.PathLike[str]'", "os.PathLike[str]")
            if not (isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)):
                raise ValueError(f"{path} needs a docstring below it: the page of Python has nothing else to say")
            return value.replace("'PretrainedConfig'", "PretrainedConfig"), str(following.value.value)
    raise ValueError(f"{module} defines no {name}")


def _names(node: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


class TypeAliases(SphinxDirective):
    """Its content is a path on each line."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """Docutils calls it."""
        lines = [line for path in self.content if path.strip() for line in self._entry(path.strip())]
        home = nodes.Element()
        self.state.nested_parse(StringList(lines, source=self.get_source_info()[0]), self.content_offset, home)
        return home.children

    def _entry(self, path: str) -> Iterator[str]:
        module, _, name = path.rpartition(".")
        value, text = alias(path)
        yield from (f".. py:currentmodule:: {module}", f".. py:type:: {name}", f"   :canonical: {value}", "")
        yield from (*(f"   {line}" for line in text.strip().splitlines()), "")


def _link(app: Any, env: Any, node: Any, text: nodes.Node) -> nodes.Node | None:
    """A link to the only class or type of ours that has the last name of a reference."""
    *module, name = node.get("reftarget", "").split(".")
    if node.get("refdomain") != "py" or module[:1] not in ([], ["mcore_bridge"]):
        return None
    objects = env.domains.python_domain.objects.items()
    places = {
        (place.docname, place.node_id)
        for path, place in objects
        if path.split(".")[-1] == name and place.objtype in ("class", "exception", "type") and not place.aliased
    }
    if len(places) != 1:
        return None
    page, anchor = places.pop()
    return make_refnode(app.builder, node["refdoc"], page, anchor, text, name)


def _readable(*arguments: Any) -> tuple[str | None, str | None]:
    """A signature that Sphinx can parse: it shows ``<factory>`` for a default that is made anew."""
    signature, returned = arguments[-2:]
    return signature and signature.replace("<factory>", "..."), returned


def setup(app: Any) -> dict[str, bool]:
    """Sphinx calls it."""
    app.add_directive("type-aliases", TypeAliases)
    app.connect("missing-reference", _link)
    app.connect("autodoc-process-signature", _readable)
    return {"parallel_read_safe": True}
