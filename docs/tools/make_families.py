"""Make pages of docs/reference, and the models in README.md, from the registry; --check only compares.

support.md is made from records of tests on GPUs, checkpoints_published.md from records of published configs.

python docs/tools/make_families.py [--check]
"""

import inspect
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import command_page
import published_page
import refused_page
import support_page
import weights_page

from mcore_bridge.architecture import Architecture, architectures, refusals
from mcore_bridge.architecture import composites as registered_composites
from mcore_bridge.config.rope_spelling import ROPE_TYPES

ROOT = Path(__file__).parent.parent.parent
REFERENCE = ROOT / "docs" / "reference"
PUBLISHED = ROOT / "tests" / "data" / "published"
START, END = "<!-- families: made by docs/tools/make_families.py -->", "<!-- end of families -->"


def families() -> dict[str, tuple[Architecture, ModuleType]]:
    """Our architectures by ``model_type``, each with its module."""
    registered = architectures()  # which imports the files
    modules = [each for name, each in sorted(sys.modules.items()) if name.startswith("mcore_bridge.models.")]
    found = {id(each.ARCHITECTURE): each for each in modules if hasattr(each, "ARCHITECTURE")}
    return {name: (each, found[id(each)]) for name, each in registered.items() if name == each.model_type}


KINDS = {
    "dense": "Dense",
    "experts": "Experts",
    "latent": "Latent attention",
    "sparse": "Latent attention over selected tokens",
    "linear": "Linear attention or Mamba-2 mixers in most layers",
}
"""The kinds of models in the README, with their titles."""


def kind_of(architecture: Architecture) -> str:
    """What is special about the rules of an architecture, as a key of ``KINDS``."""
    rules = architecture.rules(weights_page.default_config(architecture))
    names = " ".join(rule.mcore for rule in rules)
    for word, kind in (("indexer", "sparse"), (".in_proj", "linear"), ("linear_kv_down_proj", "latent")):
        if word in names:
            return kind
    return "experts" if any(rule.axis == "etp" for rule in rules) else "dense"


def summary() -> str:
    """The part of the README about models: names by kind, and how many published checkpoints load."""
    names: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for name, (architecture, _) in families().items():
        names[kind_of(architecture)] += [name, *architecture.aliases]
    lists = [f"- **{KINDS[kind]}**: {_listed(names[kind])}." for kind in KINDS]
    loading, count = published_page.counts(PUBLISHED)
    composites = registered_composites().items()
    with_tower = _listed(name for name, each in composites if not each.without_tower)
    without = _listed(name for name, each in composites if each.without_tower)
    seeing = f"- **Text and [images](docs/guide/images.md)**: {with_tower}."
    textual = f"- **The text of models of images or sound**: {without}."
    families_of = sum(len(refusal.model_types) for refusal in refusals())
    notes = f"""
Of {count} published configs, [{loading} load without changes](docs/reference/checkpoints_published.md). They include
weights in [FP8, NVFP4, MXFP4 and int4 of compressed-tensors](docs/guide/quantized.md), but not in AWQ, GPTQ and
bitsandbytes. {families_of} more families are [refused by name](docs/reference/refused.md), with the reason. The
[table of families](docs/reference/families.md) describes each family and lists its weights."""
    return "\n".join([*(_wrapped(line) for line in [*lists, seeing, textual]), notes])


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map("`{}`".format, names))


def _wrapped(line: str) -> str:
    return "\n".join(textwrap.wrap(line, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))


def overview() -> str:
    """The table of all families."""
    rows = ["| `model_type` | what it is | lines |", "|---|---|---|"]
    for name, (architecture, module) in families().items():
        names = ", ".join(f"`{alias}`" for alias in (name, *architecture.aliases))
        lines = len(inspect.getsource(module).splitlines())
        rows.append(f"| {names} | {_description(module)} | {lines} |")
    ropes = ", ".join(f"`{name}`" for name in ROPE_TYPES)
    return "\n".join([*rows, "", f"Rope types, unless the family says otherwise: {ropes}."])


def _description(module: ModuleType) -> str:
    return " ".join((module.__doc__ or "").split())


def wanted() -> dict[Path, str]:
    """The files that this script makes, with their text."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    before, rest = readme.split(START)
    after = rest.split(END)[1]
    described = {name: (each, _description(module)) for name, (each, module) in families().items()}
    files = {name: Path(str(module.__file__)).name for name, (_, module) in families().items()}
    return {
        ROOT / "README.md": f"{before}{START}\n{summary()}\n{END}{after}",
        REFERENCE / "cli.md": command_page.page(),
        REFERENCE / "families.md": weights_page.page(described, overview()),
        REFERENCE / "support.md": support_page.page(ROOT / "benchmarks" / "results"),
        REFERENCE / "checkpoints_published.md": published_page.page(PUBLISHED),
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
        sys.exit(f"out of date: {names}; run: python docs/tools/make_families.py")


if __name__ == "__main__":
    main()
