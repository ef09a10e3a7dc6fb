"""The files of the package, and what they import of each other."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "mcore_bridge"
MODULES = sorted(PACKAGE.rglob("*.py"))


def imports(path: Path, *, types: bool = False) -> Iterator[str]:
    """The modules and names that a file imports, at any depth; those for type checkers alone only with ``types``."""
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not types:
            waiting.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        waiting.extend(ast.iter_child_nodes(node))


def module_of(path: Path) -> str:
    """The path of a file in the package, without its suffix, such as ``weights/load``. A folder means its
    ``__init__``.
    """
    return path.relative_to(PACKAGE.parent).with_suffix("").as_posix().removesuffix("/__init__").partition("/")[2]


@functools.cache
def import_graph() -> dict[str, set[str]]:
    """The modules of the package that each module imports, in any way. ``__init__`` of the package is left out."""
    modules = {module_of(path): path for path in MODULES}

    def owner(imported: str) -> str:
        name = imported.removeprefix("mcore_bridge").lstrip(".").replace(".", "/")
        return name if name in modules else name.rpartition("/")[0]

    return {
        module: {owner(name) for name in imports(path, types=True) if name.startswith("mcore_bridge.")} - {module, ""}
        for module, path in modules.items()
        if module
    }
