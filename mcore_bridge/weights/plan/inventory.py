"""Inventories: the tensors that each rank holds. All of them together give the parameters of the whole model, by the
rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

from mcore_bridge.errors import MappingError
from mcore_bridge.rules.adapters import is_adapter
from mcore_bridge.rules.mapping import Binding, ModelAxes, WeightMapping, axes_of, unstacked
from mcore_bridge.rules.names import expert_of, kind_of, layer_of
from mcore_bridge.rules.scheme import Encoding
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.rules.trace import Copy, Shape, Trace, trace


@dataclass(frozen=True, slots=True)
class Inventory:
    """The tensors that one rank holds, in order, and its rank on the axes ``pp``, ``tp`` and ``etp``."""

    ranks: Mapping[str, int]
    held: tuple[TensorSpec, ...]
    is_part: bool = False
    """Whether the rank exports only some of its tensors, so that layers may be absent."""


Role = Literal["codes", "scales", "overall", "constant"]
"""What a tensor is to an encoded weight: its codes, its scales, its overall number, or a tensor that stays as it is."""


@dataclass(frozen=True, slots=True)
class EncodedPart:
    """What an entry sends of a weight that leaves encoded: its codes, its scales, or numbers of the whole weight.

    Attributes:
        role: which of these.
        plain: the entry of the weight itself, as the model holds it.
        parts: the parts of ``plain`` that are encoded.
        encodings: how each of ``parts`` is encoded.
        trace: from these numbers in HF to the shards of all ranks.
        shared: whether each holder sends the numbers of all shards.
        constant: the tensor, if training never changes it.
    """

    role: Role
    plain: ParamEntry
    parts: tuple[int, ...]
    encodings: tuple[Encoding, ...]
    trace: Trace
    shared: bool = False
    constant: TensorSpec | None = None

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """What a file has of each part."""
        if self.constant is not None:
            return (self.constant,)
        return tuple(map(attrgetter(self.role), self.encodings))

    def stored_shape(self, index: int, shape: Shape) -> Shape:
        """The shape in which a file has these numbers of a part (or of a slice), instead of ``shape``."""
        spec = self.specs[index]
        if self.role == "codes":
            return shape
        if self.role != "scales" or spec.numel == 1:
            return spec.shape
        if len(spec.shape) == len(self.encodings[index].grid) + 2:  # ModelOpt's blocks
            return (*shape[:-2], shape[-2], 1, shape[-1], 1)
        return shape[: len(spec.shape)]  # one scale for each row may be stored without a dim of 1


@dataclass(frozen=True, slots=True)
class ParamEntry:
    """One parameter of a model in an export: its HF names, the trace of its layout, and the holders of its shards.

    A shard that no HF tensor uses (a replica) is not listed. All holders of a shard are in one stage.
    """

    held: TensorSpec
    hf: tuple[str, ...]
    trace: Trace
    holders: Mapping[int, tuple[int, ...]]
    """For each tensor-parallel rank, the ranks of the group that hold its shard."""
    stack: int = 0
    """The number of experts in the HF tensor, if it stacks experts; otherwise 0."""
    copies: tuple[str, ...] = ()
    """Other names under which the first HF tensor is also written."""
    starts: tuple[int, ...] | None = None
    """The index along its dim at which each copy of ``trace.to_hf`` begins in the sent part; None if all is sent."""
    encoded: EncodedPart | None = None
    """What is sent in place of the parameter, if it leaves encoded."""

    @property
    def plain(self) -> ParamEntry:
        """The entry of the parameter as the model holds it."""
        return self if self.encoded is None else self.encoded.plain

    def shape_of(self, part: int) -> Shape:
        """The shape of an HF tensor (of one expert, in a stack), or of the slice that is sent."""
        shape = self.trace.part_shapes[part]
        return shape if self.encoded is None else self.encoded.stored_shape(part, shape)

    @property
    def sent(self) -> Shape:
        """The shape of the sent part of a shard."""
        if self.starts is None:
            return self.held.shape
        copies = self.trace.to_hf
        dim = copies[0].dim if copies else 0
        return (*self.held.shape[:dim], sum(copy.size for copy in copies), *self.held.shape[dim + 1 :])

    def copies_of(self, shard: int) -> Iterator[tuple[Copy, int]]:
        """Yield the copies from a shard to HF tensors, and the start of each in the sent part."""
        copies = self.trace.to_hf
        starts = self.starts or [copy.shard_start for copy in copies]
        return ((copy, start) for copy, start in zip(copies, starts, strict=True) if copy.shard == shard)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row (an index of dim 0) of the sent part."""
        return math.prod(self.sent[1:]) * self.held.dtype.itemsize


Encode = Callable[[Sequence[ParamEntry]], Sequence[ParamEntry]]
"""Replaces the entries of weights that leave encoded by entries of their codes and scales."""


def merge_inventories(
    mapping: WeightMapping, axes: ModelAxes, num_layers: int, inventories: Sequence[Inventory]
) -> tuple[ParamEntry, ...]:
    """Merge the inventories of ranks into the parameters of the model, in the order of their first holders.

    Raises:
        MappingError: when a parameter has no rule, a needed shard no holder, an HF name two sources, a layer no rank,
            or ranks disagree on a shape or dtype.
    """
    described: dict[str, TensorSpec] = {}
    bindings: dict[str, Binding] = {}
    holders: dict[str, dict[int, list[int]]] = {}
    for rank, inventory in enumerate(inventories):
        for held in inventory.held:
            known = described.setdefault(held.name, held)
            if known is not held and known != held:
                raise MappingError(
                    f"rank {rank} of the group holds {held}, another {described[held.name]}; make them equal"
                )
            if held.name not in bindings:
                bindings[held.name] = mapping.bind(held.name)
            shard = inventory.ranks[bindings[held.name].axis]
            holders.setdefault(held.name, {}).setdefault(shard, []).append(rank)
    stages = [inventory.ranks["pp"] for inventory in inventories]
    entries = tuple(
        _entry(described[name], bindings[name], axes, holders[name], stages)
        for name in _in_order(inventories, {name: kind_of(name) for name in described})
        if bindings[name].exported
    )
    if any(inventory.is_part for inventory in inventories):
        _check_experts(axes["experts"], [entry for entry in entries if entry.stack])
    else:
        _check_layers(num_layers, entries)
        _check_experts(axes["experts"], entries)
    _check_unique(entries)
    return entries


def _in_order(inventories: Sequence[Inventory], kind_by_name: Mapping[str, str]) -> list[str]:
    """Names in the order of their first holder. Experts of one kind follow each other, with alternating holders."""
    kinds: dict[str, int] = {}
    keys: dict[str, tuple[int, int, int]] = {}
    for rank, inventory in enumerate(inventories):
        seen: dict[str, int] = {}
        for held in inventory.held:
            kind = kind_by_name[held.name]
            seen[kind] = seen.get(kind, 0) + 1
            keys.setdefault(held.name, (kinds.setdefault(kind, len(kinds)), seen[kind], rank))
    return sorted(keys, key=keys.__getitem__)


def _entry(
    held: TensorSpec, binding: Binding, axes: ModelAxes, holders: Mapping[int, Sequence[int]], stages: Sequence[int]
) -> ParamEntry:
    traced = trace(binding.layout, held.shape, axes_of(binding, axes))
    needed = sorted({copy.shard for copy in traced.to_hf})
    absent = [shard for shard in needed if shard not in holders]
    if absent:
        raise MappingError(f"no rank of the group holds the shards {absent} of {held.name}; is a rank missing in it?")
    senders = {shard: _of_one_stage(holders[shard], stages) for shard in needed}
    stack = axes["experts"] if any(unstacked(name)[1] is not None for name in binding.hf) else 0
    return ParamEntry(held, binding.hf, traced, senders, stack, binding.copies)


def _of_one_stage(holders: Sequence[int], stages: Sequence[int]) -> tuple[int, ...]:
    """Keep only holders in the stage of the first holder: tied copies in other stages would be sent at other times."""
    return tuple(rank for rank in holders if stages[rank] == stages[holders[0]])


def _check_layers(num_layers: int, entries: Sequence[ParamEntry]) -> None:
    layers = {layer for entry in entries if (layer := layer_of(entry.held.name)) is not None}
    has_all = layers == set(range(num_layers))
    if not has_all and not all(is_adapter(entry.held.name) for entry in entries):  # some layers may have no experts
        raise MappingError(
            f"the ranks of the group hold the layers {sorted(layers)}, expected 0 to {num_layers - 1}; "
            "the model was not built whole, or a chunk was not passed"
        )


def _check_experts(num_experts: int, entries: Sequence[ParamEntry]) -> None:
    experts: dict[str, set[int]] = {}
    for entry in entries:
        if (expert := expert_of(entry.held.name)) is not None:
            experts.setdefault(kind_of(entry.held.name), set()).add(expert)
    for kind, numbers in experts.items():
        if numbers != set(range(num_experts)):
            absent = sorted(set(range(num_experts)) - numbers)
            raise MappingError(
                f"no rank of the group holds the experts {absent} of {kind}; is a rank missing in it, or a task of a "
                "group (task.mapping.group_key)?"
            )


def _check_unique(entries: Sequence[ParamEntry]) -> None:
    seen: dict[str, str] = {}
    for entry in entries:
        for name in (*entry.hf, *entry.copies):
            if name in seen:
                raise MappingError(f"{name} has two sources, {seen[name]} and {entry.held.name}; fix the rules")
            seen[name] = entry.held.name
