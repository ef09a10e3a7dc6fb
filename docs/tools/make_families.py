"""Make pages of docs/reference, and the models in README.md and index.md, from the registry; --check only compares.

support.md is made from records of tests on GPUs, checkpoints_published.md from records of published configs.

python docs/tools/make_families.py [--check]
"""

import inspect
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

import command_page
import published_page
import refused_page
import support_page
import weights_page
from weights_page import quoted

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
    "dense": ("Dense text models", ("llama", "mistral", "qwen3", "gemma3_text")),
    "experts": ("Mixture of experts", ("mixtral", "qwen3_moe", "gpt_oss", "glm4_moe")),
    "latent": ("Latent attention (MLA)", ("deepseek_v3", "kimi_k2")),
    "sparse": ("Latent attention over selected tokens (DSA)", ("deepseek_v32", "glm_moe_dsa")),
    "linear": ("Linear attention, Mamba-2 mixers or short convolutions in most layers", ("qwen3_next", "nemotron_h")),
    "images": ("Images and text", ("qwen3_vl", "qwen2_5_vl", "internvl", "gemma3")),
    "text_of": ("The text of models of images or sound", ("qwen2_audio", "voxtral")),
}
"""The kinds of models, each with its title and with examples."""


def kind_of(architecture: Architecture) -> str:
    """What is special about the rules of an architecture, as a key of ``KINDS``."""
    rules = architecture.rules(weights_page.default_config(architecture))
    names = " ".join(rule.mcore for rule in rules)
    for word, kind in (("indexer", "sparse"), (".in_proj", "linear"), ("linear_kv_down_proj", "latent")):
        if word in names:
            return kind
    return "experts" if any(rule.axis == "etp" for rule in rules) else "dense"


def names_by_kind() -> dict[str, list[str]]:
    """Every ``model_type`` by its key in ``KINDS``."""
    names: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for name, (architecture, _) in families().items():
        names[kind_of(architecture)] += [name, *architecture.aliases]
    for name, composite in registered_composites().items():
        names["text_of" if composite.without_tower else "images"].append(name)
    return names


def kinds_table(names: Mapping[str, Sequence[str]]) -> str:
    """The table of the first page: how many models of each kind there are, and examples."""
    rows = [f"| {title} | {len(names[kind])} | {quoted(examples)} |" for kind, (title, examples) in KINDS.items()]
    assert all({*examples} <= {*names[kind]} for kind, (_, examples) in KINDS.items())
    return "\n".join(["| kind | `model_type`s | examples |", "|---|---|---|", *rows])


def summary(names: Mapping[str, Sequence[str]], docs: str) -> str:
    """The part of README and first page about models. ``docs`` leads from the page to the folder of docs."""
    loading, count = published_page.counts(PUBLISHED)
    refused = sum(len(refusal.model_types) for refusal in refusals())
    of_text = sum(map(len, names.values())) - len(names["images"]) - len(names["text_of"])
    text = f"""
{of_text} `model_type`s of text are supported: dense or with experts, and with full, latent, sparse or linear attention
or Mamba-2 mixers. {len(names["images"])} more are of images and text. [This table]({docs}reference/families.md) has all
of them. Of {count} published configs, [{loading} load without changes]({docs}reference/checkpoints_published.md). They
include weights in [FP8, NVFP4, MXFP4 and int4 of compressed-tensors]({docs}guide/quantized.md), but not in AWQ, GPTQ
and bitsandbytes. {refused} more families are [refused by name]({docs}reference/refused.md), with the reason."""
    return _wrapped(text)


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text.strip(), 120, break_long_words=False, break_on_hyphens=False))


def overview(names: Mapping[str, Sequence[str]]) -> str:
    """The table of all families, and the composites, whose weights are those of their text and of transformers."""
    rows = ["| `model_type` | what it is | lines |", "|---|---|---|"]
    for name, (architecture, module) in families().items():
        aliases = quoted((name, *architecture.aliases))
        lines = len(inspect.getsource(module).splitlines())
        rows.append(f"| {aliases} | {_description(module)} | {lines} |")
    ropes = quoted(ROPE_TYPES)
    composites = f"""
Each of these models of [images and text](../guide/images.md) has the text model of one of the families:
{quoted(names["images"])}. Of these models of images or sound, only the text is built: {quoted(names["text_of"])}."""
    return "\n".join([*rows, "", f"Rope types, unless the family says otherwise: {ropes}.", "", _wrapped(composites)])


def _description(module: ModuleType) -> str:
    return " ".join((module.__doc__ or "").split())


def _between(page: str, text: str) -> str:
    before, rest = (ROOT / page).read_text(encoding="utf-8").split(START)
    return f"{before}{START}\n{text}\n{END}{rest.split(END)[1]}"


def wanted() -> dict[Path, str]:
    """The files that this script makes, with their text."""
    names = names_by_kind()
    described = {name: (each, _description(module)) for name, (each, module) in families().items()}
    files = {name: Path(str(module.__file__)).name for name, (_, module) in families().items()}
    return {
        ROOT / "README.md": _between("README.md", summary(names, "docs/")),
        ROOT / "docs" / "index.md": _between("docs/index.md", f"{kinds_table(names)}\n\n{summary(names, '')}"),
        REFERENCE / "cli.md": command_page.page(),
        REFERENCE / "families.md": weights_page.page(described, overview(names)),
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
