"""Make pages of docs/reference, and the table in README.md, from the registry; --check only compares.

support.md comes from the records of tests on GPUs, checkpoints_published.md from those of published configs.

python docs/tools/make_families.py [--check]
"""

import inspect
import sys
from pathlib import Path
from types import ModuleType

import published_page
import refused_page
import support_page
import weights_page

from mcore_bridge.architecture import Architecture, architectures, refusals
from mcore_bridge.config.rope_spelling import ROPE_TYPES

ROOT = Path(__file__).parent.parent.parent
REFERENCE = ROOT / "docs" / "reference"
START, END = "<!-- families: made by docs/tools/make_families.py -->", "<!-- end of families -->"


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
    count = sum(len(refusal.model_types) for refusal in refusals())
    notes = f"""
Rope types, where the family does not say otherwise: {ropes}.
Refused by name are {count} more, each with the reason and where it was checked:
[docs/reference/refused.md](docs/reference/refused.md)."""
    return "\n".join([*rows, notes])


def _description(module: ModuleType) -> str:
    return " ".join((module.__doc__ or "").split())


def wanted() -> dict[Path, str]:
    """The files that hold what is made here, with the text that they should have."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    before, rest = readme.split(START)
    after = rest.split(END)[1]
    described = {name: (each, _description(module)) for name, (each, module) in families().items()}
    files = {name: Path(str(module.__file__)).name for name, (_, module) in families().items()}
    return {
        ROOT / "README.md": f"{before}{START}\n{overview()}\n{END}{after}",
        REFERENCE / "families.md": weights_page.page(described),
        REFERENCE / "support.md": support_page.page(ROOT / "benchmarks" / "results"),
        REFERENCE / "checkpoints_published.md": published_page.page(ROOT / "tests" / "data" / "published"),
        REFERENCE / "refused.md": refused_page.page({name: each for name, (each, _) in described.items()}, files),
    }


def main() -> None:
    """Write, or with --check compare."""
    texts = wanted()
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if "--check" not in sys.argv[1:]:
        for path in stale:
            path.write_text(texts[path], encoding="utf-8")
    elif stale:
        names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
        sys.exit(f"not what registry and records say: {names}; run: python docs/tools/make_families.py")


if __name__ == "__main__":
    main()
