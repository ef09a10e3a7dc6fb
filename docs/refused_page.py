"""The text of docs/refused.md: what each family refuses, and which families are refused."""

from collections.abc import Iterator, Mapping

from mcore_bridge.architecture import Architecture, Refusal, refusals
from mcore_bridge.config.fields import Derive, Require

HEAD = """# What is refused

Made from the registry by `docs/make_families.py`; CI checks that it is up to date.

What megatron-core's `GPTModel` cannot compute exactly as the HF model does raises `ConfigError` with a reason, before
anything is built. That is so for families as a whole, where neither a config nor a small module in a slot of
megatron-core's own layers would do; for values of fields in families that are supported; and for each field of a
config that the table of its family does not know. A name that is neither here nor in [families.md](families.md) is
one that nobody has written. A package that has layers of its own can register any name that is refused here.

The code that is named was read in megatron-core 0.16.1 and 0.19.2, and in transformers 5.23; tests look for each of
these names in what is installed, and try each of these values.
"""
SHARED = """## In several families

Numbers in the table stand for these.
"""
MESHES = """## On some meshes

The mesh is refused with `MeshError` where megatron-core could not cut a model along it, or would cut it otherwise
than the HF model means. Besides plain divisions of heads, sizes and vocabularies (`config/mesh/divisibility.py`)
that is: `etp` above 1 for experts with biases; MTP layers in a model that lists windows or ropes by layer, or whose
last layer attends linearly; and linear attention whose key heads are not a multiple of `tp` times `cp`.
"""


def page(families: Mapping[str, Architecture], files: Mapping[str, str]) -> str:
    """The text of the page, from the architectures and the names of their files."""
    refused = {name: list(dict.fromkeys(values(each))) for name, each in families.items()}
    everywhere = [text for text in refused[next(iter(refused))] if all(text in own for own in refused.values())]
    others = [text for own in refused.values() for text in own if text not in everywhere]
    shared = [text for text in dict.fromkeys(others) if others.count(text) > 1]
    lines = [HEAD, "## In every supported family", "", *(f"- {text}" for text in everywhere), ""]
    lines += [SHARED, *(f"{number}. {text}" for number, text in enumerate(shared, 1)), "", MESHES]
    lines += ["## By family", "", "| `model_type` | refused | where |", "|---|---|---|"]
    for name, own in refused.items():
        numbers = sorted(shared.index(text) + 1 for text in own if text in shared)
        told = [", ".join(map(str, numbers)), *(text for text in own if text not in shared and text not in everywhere)]
        lines.append(f"| `{name}` | {'<br>'.join(filter(None, told))} | `mcore_bridge/models/{files[name]}` |")
    return "\n".join([*lines, *_by_name(refusals()), ""])


def values(architecture: Architecture) -> Iterator[str]:
    """The values that the table of an architecture refuses, each with the reason."""
    for field in architecture.fields:
        if isinstance(field, Require):
            allowed = " and ".join(f"`{value!r}`" for value in field.allowed)
            yield f"`{field.hf}` but {allowed}: {field.reason}"
        elif isinstance(field, Derive):
            yield from field.refuses


def _by_name(refused: tuple[Refusal, ...]) -> Iterator[str]:
    for refusal in refused:
        names = ", ".join(f"`{name}`" for name in refusal.model_types)
        seen = "<br>".join(f"`{name}`" for name in refusal.checked)
        yield f"| {names} | the family: {refusal.reason} | {seen} |"
