"""Make docs/families.md, and the table in README.md, from the registry. With --check, only say whether they are so.

python docs/make_families.py [--check]
"""

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from mcore_bridge.architecture import Architecture, architectures
from mcore_bridge.config.fields import Field, Require
from mcore_bridge.config.spelling import ROPE_TYPES
from mcore_bridge.config.tables import DENSE
from mcore_bridge.weights import layout
from mcore_bridge.weights.mapping import Rule

ROOT = Path(__file__).parent.parent
START, END = "<!-- families: made by docs/make_families.py -->", "<!-- end of families -->"
LAYOUTS = {value: name for name, value in vars(layout).items() if name.isupper() and isinstance(value, layout.Layout)}


def families() -> dict[str, tuple[Architecture, ModuleType]]:
    """Our architectures by ``model_type``, each with the file that it is."""
    registered = architectures()  # which imports the files
    modules = [each for name, each in sorted(sys.modules.items()) if name.startswith("mcore_bridge.models.")]
    found = {id(each.ARCHITECTURE): each for each in modules if hasattr(each, "ARCHITECTURE")}
    return {name: (each, found[id(each)]) for name, each in registered.items() if name == each.model_type}


def overview() -> str:
    """The table of all families."""
    rows = ["| `model_type` | what it is | lines |", "|---|---|---|"]
    for name, (architecture, module) in families().items():
        names = ", ".join(f"`{each}`" for each in (name, *architecture.aliases))
        lines = len(inspect.getsource(module).splitlines())
        rows.append(f"| {names} | {_description(module)} | {lines} |")
    ropes = ", ".join(f"`{name}`" for name in ROPE_TYPES)
    return "\n".join([*rows, "", f"Rope types, where the family does not say otherwise: {ropes}."])


def page() -> str:
    """The text of docs/families.md."""
    return "\n".join([*_page(), ""])


def _page() -> Iterator[str]:
    yield "# Families"
    yield ""
    yield "Made from the registry by `docs/make_families.py`; CI checks that it is up to date. The names of layouts are"
    yield "explained in [design.md](design.md)."
    yield ""
    yield overview()
    yield ""
    yield "## What all of them need"
    yield ""
    yield from _requirements(DENSE)
    for name, (architecture, module) in families().items():
        yield ""
        yield f"## {name}"
        yield ""
        yield _description(module)
        if architecture.megatron_core is not None:
            yield ""
            yield f"Needs megatron-core {architecture.megatron_core.version}: {architecture.megatron_core.reason}."
        own = tuple(field for field in architecture.fields if field not in DENSE)
        requirements = list(_requirements(own))
        if requirements:
            yield ""
            yield from requirements
        yield ""
        yield "| megatron-core | HF | layout |"
        yield "|---|---|---|"
        for rule in architecture.rules(None):
            yield _row(rule)
        if architecture.ignored:
            yield ""
            yield f"Left unused when a checkpoint holds it: {', '.join(f'`{each}`' for each in architecture.ignored)}."


def _description(module: ModuleType) -> str:
    return " ".join((module.__doc__ or "").split())


def _requirements(fields: tuple[Field, ...]) -> Iterator[str]:
    for field in fields:
        if isinstance(field, Require):
            values = " or ".join(f"`{value!r}`" for value in field.allowed)
            yield f"- `{field.hf}` must be {values}: {field.reason}."


def _row(rule: Rule) -> str:
    hf = ", ".join(f"`{name}`" for name in rule.hf)
    return f"| `{rule.mcore}` | {hf} | {LAYOUTS.get(rule.layout, 'own')} |"


def wanted() -> dict[Path, str]:
    """The files that hold what is made here, with the text that they should have."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    before, rest = readme.split(START)
    after = rest.split(END)[1]
    return {
        ROOT / "README.md": f"{before}{START}\n{overview()}\n{END}{after}",
        ROOT / "docs" / "families.md": page(),
    }


def main() -> None:
    """Write, or with --check compare."""
    stale = [path for path, text in wanted().items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if "--check" not in sys.argv[1:]:
        for path in stale:
            path.write_text(wanted()[path], encoding="utf-8")
    elif stale:
        names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
        sys.exit(f"not what the registry says: {names}; run: python docs/make_families.py")


if __name__ == "__main__":
    main()
