"""Canonical names: what one rank holds, under names that do not depend on the mesh, on wrappers or on the backend.

Layer and expert numbers become global, read from the layers as built (``layer_number``, ``local_expert_indices``) and
never computed from the mesh; experts have one spelling, grouped or not; norms that TransformerEngine fuses into the
next linear get the names that they have alone. An HF name has one mcore name.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from mcore_bridge.errors import MappingError

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

# TransformerEngine keeps the norm in front of a linear as `layer_norm_{weight,bias}` of that linear
# (megatron-core 0.16.1, gpt_layer_specs.py: sharded_state_dict_keys_map).
_FUSED_NORMS = (
    (re.compile(r"self_attention\.(?:linear_qkv|in_proj)\.layer_norm_(weight|bias)$"), r"input_layernorm.\1"),
    (
        re.compile(r"self_attention\.linear_(q|kv)_up_proj\.layer_norm_(weight|bias)$"),
        r"self_attention.\1_layernorm.\2",
    ),
    (re.compile(r"mlp\.linear_fc1\.layer_norm_(weight|bias)$"), r"pre_mlp_layernorm.\1"),
)
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERTS = (  # megatron-core's SequentialMLP, and TEGroupedMLP, which numbers the tensors of one module
    re.compile(r"\.experts\.local_experts\.(?P<number>\d+)\.(?P<tensor>linear_fc[12]\.(?:weight|bias))$"),
    re.compile(r"\.experts\.(?P<tensor>linear_fc[12]\.(?:weight|bias))(?P<number>\d+)$"),
)
_MTP = re.compile(r"^mtp\.layers\.(\d+)\.(?:mtp_model_layer(?=\.))?")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Numbering:
    """The global numbers of a chunk's layers, of the experts that this rank holds in each, and of its MTP layers."""

    layers: tuple[int, ...]
    experts: tuple[int, ...] = ()
    mtp: tuple[int, ...] = ()


def unwrap(model: nn.Module) -> GPTModel:
    """The bare ``GPTModel`` inside wrappers that keep their model as ``module`` (DDP, Float16Module, ...)."""
    bare: Any = model
    while not hasattr(bare, "decoder"):
        inner = getattr(bare, "module", None)
        if not isinstance(inner, nn.Module):
            raise MappingError(
                f"expected a megatron-core GPTModel or a wrapper with one at .module, found {type(model).__name__} "
                f"that ends at {type(bare).__name__}"
            )
        bare = inner
    return bare


def held_tensors(models: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Parameters and persistent buffers of this rank's chunks by canonical name, in the order of the modules.

    Raises:
        MappingError: when two chunks hold the same canonical name.
    """
    held: dict[str, Tensor] = {}
    for chunk in map(unwrap, models):
        pairs = list(_tensors(chunk))
        names = _canonical(chunk, tuple(name for name, _ in pairs))
        for name, (_, tensor) in zip(names, pairs, strict=True):
            if name in held:
                raise MappingError(f"{name} is in two of the {len(models)} chunks given; pass each chunk once")
            held[name] = tensor
    return held


def _canonical(chunk: GPTModel, names: tuple[str, ...]) -> tuple[str, ...]:
    """The canonical names of a chunk's own, kept for as long as it has these: every export asks for them."""
    numbering = numbering_of(chunk)
    kept = _kept.get(chunk)
    if kept is None or kept[:2] != (names, numbering):
        kept = _kept[chunk] = (names, numbering, tuple(canonical(name, numbering) for name in names))
    return kept[2]


_kept: weakref.WeakKeyDictionary[nn.Module, tuple[tuple[str, ...], Numbering, tuple[str, ...]]] = (
    weakref.WeakKeyDictionary()
)


def numbering_of(chunk: GPTModel) -> Numbering:
    """The numbers of a chunk, as it was built."""
    layers = tuple(layer.layer_number - 1 for layer in chunk.decoder.layers)
    indices = (getattr(module, "local_expert_indices", None) for module in chunk.modules())
    experts = next((tuple(each) for each in indices if each is not None), ())
    mtp = getattr(chunk, "mtp", None)
    return Numbering(layers, experts, tuple(layer.layer_number - 1 for layer in mtp.layers) if mtp is not None else ())


def canonical(name: str, numbering: Numbering) -> str:
    """The canonical name of a chunk's parameter."""
    name = _LAYER.sub(lambda match: f"decoder.layers.{numbering.layers[int(match[1])]}.", name)
    name = _MTP.sub(lambda match: _mtp_prefix(match, numbering), name)
    for pattern in _EXPERTS:
        name = pattern.sub(lambda match: f".experts.{numbering.experts[int(match['number'])]}.{match['tensor']}", name)
    for pattern, plain in _FUSED_NORMS:
        name = pattern.sub(plain, name)
    return name


def _mtp_prefix(match: re.Match[str], numbering: Numbering) -> str:
    """megatron-core 0.19 calls the layer inside ``mtp_model_layer``, earlier releases ``transformer_layer``."""
    inner = "transformer_layer" if match[0].endswith("mtp_model_layer") else ""
    return f"mtp.layers.{numbering.mtp[int(match[1])]}.{inner}"


def layer_of(name: str) -> int | None:
    """The layer number in a canonical name, if it has one."""
    match = _LAYER.match(name)
    return int(match[1]) if match else None


def mtp_layer_of(name: str) -> int | None:
    """The number of the MTP layer in a canonical name, if it has one."""
    match = _MTP.match(name)
    return int(match[1]) if match else None


def expert_of(name: str) -> int | None:
    """The number of the routed expert in a canonical name, if it has one."""
    match = _EXPERT.search(name)
    return int(match[1]) if match else None


def kind_of(name: str) -> str:
    """A canonical name without the number of its expert: what the experts of a layer have in common."""
    return _EXPERT.sub(".experts.*.", name)


def shift_expert(name: str, shift: int) -> str:
    """A canonical name with the number of its expert, if it has one, raised by ``shift``."""
    return _EXPERT.sub(lambda match: f".experts.{int(match[1]) + shift}.", name)


def _tensors(chunk: GPTModel) -> Iterator[tuple[str, Tensor]]:
    """``state_dict`` without its hooks and copies: parameters, then the buffers that it would hold."""
    yield from chunk.named_parameters()
    for prefix, module in chunk.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer
