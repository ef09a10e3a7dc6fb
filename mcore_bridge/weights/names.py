"""Canonical names: what one rank holds, under names that do not depend on the mesh, on wrappers or on the backend.

Layer and expert numbers become global, read from the layers as built (``layer_number``, ``local_expert_indices``) and
never computed from the mesh; experts have one spelling, grouped or not; norms that TransformerEngine fuses into the
next linear get the names that they have alone. An HF name has one mcore name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import is_
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from mcore_bridge.errors import MappingError

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

# fmt: off
_FUSED_NORMS = (
    ("input_layernorm",             "self_attention.linear_qkv"),
    ("input_layernorm",             "self_attention.in_proj"),
    ("self_attention.q_layernorm",  "self_attention.linear_q_up_proj"),
    ("self_attention.kv_layernorm", "self_attention.linear_kv_up_proj"),
    ("pre_mlp_layernorm",           "mlp.linear_fc1"),
)
# fmt: on
"""Norms of a layer, and the linear layers behind them into which TransformerEngine fuses them.

Their tensors are then ``layer_norm_weight`` and ``layer_norm_bias`` of the linear layer (megatron-core 0.16.1 and
0.19.2: gpt_layer_specs.py, experimental_attention_variant_module_specs.py)."""
INDEXER = "self_attention.core_attention.indexer"
"""It reads what the norm of queries gives, so sparse attention has the norms of latents apart."""
_UNFUSED = [
    (re.compile(rf"{re.escape(linear)}\.layer_norm_(weight|bias)$"), rf"{norm}.\1") for norm, linear in _FUSED_NORMS
]
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERTS = (  # megatron-core's SequentialMLP, and TEGroupedMLP, which numbers the tensors of one module
    re.compile(r"\.experts\.local_experts\.(?P<number>\d+)\.(?P<tensor>linear_fc[12]\.(?:weight|bias))$"),
    re.compile(r"\.experts\.(?P<tensor>linear_fc[12]\.(?:weight|bias))(?P<number>\d+)$"),
)
_MTP = re.compile(r"^mtp\.layers\.(\d+)\.(?:mtp_model_layer(?=\.))?")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_PLAIN = frozenset({Tensor, nn.Parameter})


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
        MappingError: when two chunks hold the same canonical name, or a tensor's values are not in its own memory.
    """
    held: dict[str, Tensor] = {}
    for chunk in map(unwrap, models):
        roll: _Roll | None = getattr(chunk, "bridge_roll", None)
        if roll is None or not roll.is_right():
            roll = chunk.bridge_roll = _Roll.of(chunk)
        found = dict(zip(roll.names, roll.tensors(), strict=True))
        if twice := held.keys() & found.keys():
            raise MappingError(f"{min(twice)} is in two of the {len(models)} chunks given; pass each chunk once")
        held |= found
    if not _PLAIN.issuperset(map(type, held.values())):
        _require_own_memory(held)
    return held


def _require_own_memory(held: Mapping[str, Tensor]) -> None:
    """Raise ``MappingError`` for a tensor that only stands for others: quantized ones do, and those that FSDP cuts."""
    for name, tensor in held.items():
        if type(tensor) not in _PLAIN and tensor.untyped_storage().nbytes() and not tensor.data_ptr():
            raise MappingError(
                f"{name} is a {type(tensor).__name__}, whose values are in other tensors: expected a parameter with "
                "memory of its own. Build without fp8_param, and wrap without FSDP"
            )


@dataclass(frozen=True, slots=True)
class _Roll:
    """Where the tensors of a chunk are, by canonical name.

    Kept on the chunk, as every export begins with it, and compared at once for all of the thousands of modules.
    """

    names: tuple[str, ...]
    places: tuple[int, ...]
    """Of the tensors with these names, among all in ``holders``."""
    children: tuple[dict[str, nn.Module | None], ...]
    """The ``_modules`` of each module."""
    holders: tuple[dict[str, Tensor | None], ...]
    """The ``_parameters`` and ``_buffers`` of each module."""
    seen: tuple[list[object], ...]
    """What the modules had when the chunk was looked at."""

    @classmethod
    def of(cls, chunk: GPTModel) -> _Roll:
        numbering = numbering_of(chunk)
        modules = dict(chunk.named_modules())
        children = tuple(module._modules for module in modules.values())
        holders = tuple(each for module in modules.values() for each in (module._parameters, module._buffers))
        prefixes = (f"{prefix}." if prefix else "" for prefix in modules for _ in range(2))
        paths = [prefix + name for prefix, holder in zip(prefixes, holders, strict=True) for name in holder]
        numbers = {path: number for number, path in enumerate(paths)}
        own = [name for name, _ in _tensors(chunk)]
        names = tuple(canonical(name, numbering) for name in own)
        places = tuple(numbers[name] for name in own)
        return cls(names, places, children, holders, cls._look(children, holders))

    @staticmethod
    def _look(children: Sequence[dict[str, Any]], holders: Sequence[dict[str, Any]]) -> tuple[list[object], ...]:
        """Children and names of all modules, how many each has of them, and which tensors are None."""
        each = chain.from_iterable
        absent = map(is_, each(map(dict.values, holders)), repeat(None))
        found = each(map(dict.values, children)), map(len, children), each(holders), map(len, holders), absent
        return tuple([*every] for every in found)

    def is_right(self) -> bool:
        """Whether the chunk has the modules that were found, and these the same names."""
        return self._look(self.children, self.holders) == self.seen

    def tensors(self) -> Iterator[Any]:
        """What is in these places now."""
        found = [*chain.from_iterable(map(dict.values, self.holders))]
        return map(found.__getitem__, self.places)


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
    return plain_key(name)


def plain_key(key: str) -> str:
    """A key of a checkpoint with the norms in it under the names that they have alone, as canonical names have them.

    Which norms TransformerEngine fuses into linear layers differs between backends, and between megatron-core's specs.
    """
    for pattern, plain in _UNFUSED:
        key = pattern.sub(plain, key)
    return key


def fused_norms(modules: Collection[str]) -> dict[str, str]:
    """How names of norms begin in a layer, and in its place with TransformerEngine: the inverse of ``plain_key``.

    Args:
        modules: those of a layer by canonical name, within the layer.
    """
    apart = "self_attention.linear_kv_up_proj", "self_attention.linear_q_up_proj"
    is_sparse = any(module.startswith(INDEXER) for module in modules)
    return {
        f"{norm}.": f"{linear}.layer_norm_"
        for norm, linear in _FUSED_NORMS
        if linear in modules and not (is_sparse and linear in apart)
    }


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


def count_mtp_layers(names: Iterable[str]) -> int:
    """How many MTP layers canonical names are of."""
    return len({mtp_layer_of(name) for name in names} - {None})


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


def renumber_layer(name: str, layer: int) -> str:
    """A canonical name with another number for its decoder layer, if it has one."""
    return _LAYER.sub(f"decoder.layers.{layer}.", name)


def _tensors(chunk: GPTModel) -> Iterator[tuple[str, Tensor]]:
    """``state_dict`` without its hooks and copies: parameters, then the buffers that it would hold."""
    yield from chunk.named_parameters()
    for prefix, module in chunk.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer
