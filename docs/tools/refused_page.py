"""The text of docs/reference/refused.md: what each family refuses, and which families are refused."""

from collections.abc import Iterator, Mapping

from weights_page import quoted

from mcore_bridge.architecture import Architecture, Refusal, refusals
from mcore_bridge.config.fields import Derive, Require

HEAD = """# What is refused

Made from the registry by `docs/tools/make_families.py`; CI checks that it is up to date.

If megatron-core's `GPTModel` cannot compute exactly what the HF model does, a `ConfigError` with the reason is raised
before anything is built. There are four cases. A whole family is refused if neither a config nor a submodule of
megatron-core's layers is enough, or if nobody has written the submodule yet. Single values of fields are refused in
supported families. Fields that are not in the table of a family are refused, too. The last case is a config whose
first name in `architectures` is no class of its `model_type`: a draft head for speculative decoding, a reward model, or
another family. Configs without `architectures` pass. A family that is neither on this page
nor in [families.md](families.md) has no implementation yet. A package with other layers can register any family that is
refused here.

The named code was read in megatron-core 0.16.1 and 0.19.2, and in transformers 5.24. Tests check that each of these
names exists in the installed releases, and try each of these values.
"""
MESHES = """## On some meshes

A mesh is refused with `MeshError` if megatron-core cannot cut the model along it, or would compute something else than
the HF model. Heads, sizes and vocabularies must be divisible (`config/mesh/divisibility.py`). Four more cases are
refused:

- `etp` above 1 for experts with biases;
- MTP layers whose window or rope is not known, in a model that lists windows or ropes by layer;
- MTP layers in a model whose last layer has linear attention;
- linear attention if the number of its key heads is not a multiple of `tp` times `cp`.

MTP layers are refused with `ConfigError` if HF has no names for so many layers. An MTP layer of Nemotron-H must have
attention, alone or before an MLP or experts: no published model has another kind.
"""


def page(families: Mapping[str, Architecture], files: Mapping[str, str]) -> str:
    """The text of the page, from the architectures and the names of their files."""
    refused = {name: list(dict.fromkeys(values(each))) for name, each in families.items()}
    everywhere = [text for text in refused[next(iter(refused))] if all(text in own for own in refused.values())]
    lines = [HEAD, "## In every supported family", "", *(f"- {text}" for text in everywhere), "", MESHES]
    lines += ["## Whole families", "", "| `model_type` | reason | where |", "|---|---|---|", *_by_name(refusals()), ""]
    for name, own in refused.items():
        lines += [f"## {name}", "", *(f"- {text}" for text in own if text not in everywhere), ""]
        lines += [f"From `mcore_bridge/models/{files[name]}`.", ""]
    return "\n".join(lines)


def values(architecture: Architecture) -> Iterator[str]:
    """The values that the table of an architecture refuses, each with the reason."""
    for field in architecture.fields:
        if isinstance(field, Require):
            allowed = " and ".join(f"`{value!r}`" for value in field.allowed)
            yield f"`{field.hf}` other than {allowed}: {field.reason}"
        elif isinstance(field, Derive):
            yield from field.refuses


def _by_name(refused: tuple[Refusal, ...]) -> Iterator[str]:
    for refusal in refused:
        names = quoted(refusal.model_types)
        seen = "<br>".join(f"`{name}`" for name in refusal.checked)
        yield f"| {names} | {refusal.reason} | {seen} |"
