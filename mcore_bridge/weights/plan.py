"""Which shards travel together and what they become: data, the same on every rank, made without a process group.

Every rank of a group sends one window of bytes per bucket, all at the same time, so that all pipeline stages send at
once. A bucket holds whole parameters: what an engine fuses in one load call (q, k and v; gate and up) never straddles
two buckets, whatever their size, and neither do the experts that one HF tensor holds.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mcore_bridge.errors import MappingError
from mcore_bridge.weights.layout import Axes
from mcore_bridge.weights.mapping import Binding, WeightMapping, axes_of, unstacked
from mcore_bridge.weights.names import expert_of, kind_of, layer_of
from mcore_bridge.weights.trace import Shape, Trace, trace

ALIGNMENT = 256  # bytes; a multiple of every itemsize, so that a shard can be viewed in place


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor that a rank holds, as the others need to know it."""

    mcore: str
    shape: Shape
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes that the tensor takes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Inventory:
    """All that one rank holds, in order, and its place on the axes ``pp``, ``tp`` and ``etp``."""

    ranks: Mapping[str, int]
    held: tuple[Held, ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """Where a shard lies: in the window of the group's rank ``sender``, from byte ``start`` on."""

    sender: int
    start: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter on its way: its HF names, what its layout does, and its shards by tensor-parallel rank.

    A shard that no HF tensor takes anything from (a replica) does not travel and is not listed. ``stack`` is the number
    of entries of the HF tensor of which this is one, or 0 where an HF name is that of a whole tensor.
    """

    held: Held
    hf: tuple[str, ...]
    trace: Trace
    shards: Mapping[int, Shard]
    stack: int = 0
    copies: tuple[str, ...] = ()
    """Further names under which the first HF tensor is written."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """What travels in one message: each rank of the group sends ``num_bytes``."""

    entries: tuple[Entry, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """All buckets, in the order in which they travel, which is also the order of the HF tensors."""

    buckets: tuple[Bucket, ...]

    def tensors(self) -> Iterator[tuple[str, Shape, torch.dtype]]:
        """Name, shape and dtype of every HF tensor, in order."""
        for bucket in self.buckets:
            stacks = _Stacks(torch.device("meta"))
            for entry in bucket.entries:
                for index in range(len(entry.hf)):
                    for name, tensor in stacks.put(entry, index, lambda part: None):
                        yield name, tuple(tensor.shape), tensor.dtype


def plan_export(
    mapping: WeightMapping, axes: Axes, num_layers: int, inventories: Sequence[Inventory], *, bucket_bytes: int
) -> ExportPlan:
    """Plan the export of a model whose ``inventories`` are given by rank of the group that exports it.

    Args:
        bucket_bytes: bytes that a rank receives per bucket; a larger parameter gets a bucket of its own.

    Raises:
        MappingError: when a parameter has no rule, a needed shard no holder, an HF name two sources, a layer no rank,
            or ranks disagree on a shape or dtype.
    """
    entries = _entries(mapping, axes, inventories)
    _check_numbers(num_layers, axes["experts"], entries)
    _check_unique(entries)
    lanes: dict[int, list[Entry]] = {}
    for entry in entries:
        lane = inventories[min(shard.sender for shard in entry.shards.values())].ranks["pp"]
        lanes.setdefault(lane, []).append(entry)
    window = bucket_bytes // len(inventories)
    return ExportPlan(tuple(_fill_buckets([_units(lane) for lane in lanes.values()], window)))


def _entries(mapping: WeightMapping, axes: Axes, inventories: Sequence[Inventory]) -> list[Entry]:
    described: dict[str, Held] = {}
    bindings: dict[str, Binding] = {}
    holders: dict[str, dict[int, int]] = {}
    for rank, inventory in enumerate(inventories):
        for held in inventory.held:
            if described.setdefault(held.mcore, held) != held:
                raise MappingError(
                    f"rank {rank} of the group holds {held}, another {described[held.mcore]}; make them equal"
                )
            if held.mcore not in bindings:
                bindings[held.mcore] = mapping.bind(held.mcore)
            place = inventory.ranks[bindings[held.mcore].axis]
            holders.setdefault(held.mcore, {}).setdefault(place, rank)
    return [
        _entry(described[name], bindings[name], axes, holders[name])
        for name in _in_order(inventories)
        if bindings[name].exported
    ]


def _in_order(inventories: Sequence[Inventory]) -> list[str]:
    """Names as their first holder has them; the experts of one kind side by side, dealt in turn from their holders."""
    kinds: dict[str, int] = {}
    places: dict[str, tuple[int, int, int]] = {}
    for rank, inventory in enumerate(inventories):
        seen: dict[str, int] = {}
        for held in inventory.held:
            kind = kind_of(held.mcore)
            seen[kind] = seen.get(kind, 0) + 1
            places.setdefault(held.mcore, (kinds.setdefault(kind, len(kinds)), seen[kind], rank))
    return sorted(places, key=places.__getitem__)


def _entry(held: Held, binding: Binding, axes: Axes, holders: Mapping[int, int]) -> Entry:
    traced = trace(binding.layout, held.shape, axes_of(binding, axes))
    needed = sorted({copy.shard for copy in traced.to_hf})
    absent = [shard for shard in needed if shard not in holders]
    if absent:
        raise MappingError(f"no rank of the group holds the shards {absent} of {held.mcore}; is a rank missing in it?")
    stack = axes["experts"] if any(unstacked(name)[1] is not None for name in binding.hf) else 0
    shards = {shard: Shard(holders[shard], -1) for shard in needed}
    return Entry(held, binding.hf, traced, shards, stack, binding.copies)


def _check_numbers(num_layers: int, num_experts: int, entries: Sequence[Entry]) -> None:
    found = {layer for entry in entries if (layer := layer_of(entry.held.mcore)) is not None}
    if found != set(range(num_layers)):
        raise MappingError(
            f"the ranks of the group hold the layers {sorted(found)}, expected 0 to {num_layers - 1}; "
            "the model was not built whole, or a chunk was not passed"
        )
    experts: dict[str, set[int]] = {}
    for entry in entries:
        if (expert := expert_of(entry.held.mcore)) is not None:
            experts.setdefault(kind_of(entry.held.mcore), set()).add(expert)
    for kind, numbers in experts.items():
        if numbers != set(range(num_experts)):
            absent = sorted(set(range(num_experts)) - numbers)
            raise MappingError(f"no rank of the group holds the experts {absent} of {kind}; is a rank missing in it?")


def _check_unique(entries: Sequence[Entry]) -> None:
    seen: dict[str, str] = {}
    for entry in entries:
        for name in (*entry.hf, *entry.copies):
            if name in seen:
                raise MappingError(f"{name} would come from {seen[name]} and from {entry.held.mcore}; fix the rules")
            seen[name] = entry.held.mcore


def _units(lane: list[Entry]) -> list[list[Entry]]:
    """What must travel together: the entries of one HF tensor; others alone."""
    units: list[list[Entry]] = []
    for entry in lane:
        together = units and entry.stack and kind_of(units[-1][0].held.mcore) == kind_of(entry.held.mcore)
        units[-1].append(entry) if together else units.append([entry])
    return units


def _fill_buckets(lanes: list[list[list[Entry]]], window: int) -> Iterator[Bucket]:
    """Take from every lane (the units of one pipeline stage) as many as fit, at least one, until all are empty."""
    waiting = [deque(lane) for lane in lanes]
    while any(waiting):
        filled: Counter[int] = Counter()  # bytes by sender
        taken: list[Entry] = []
        for lane in waiting:
            first = True
            while lane and (first or all(filled[s] + size <= window for s, size in _sizes(lane[0]).items())):
                taken += [_place(entry, filled) for entry in lane.popleft()]
                first = False
        yield Bucket(tuple(taken), max(filled.values()))


def _sizes(unit: list[Entry]) -> Counter[int]:
    """Bytes that each sender sends of a unit."""
    sizes: Counter[int] = Counter()
    for entry in unit:
        sizes.update({shard.sender: _aligned(entry.held.num_bytes) for shard in entry.shards.values()})
    return sizes


def _place(entry: Entry, filled: Counter[int]) -> Entry:
    shards = {index: Shard(shard.sender, filled[shard.sender]) for index, shard in entry.shards.items()}
    filled.update({shard.sender: _aligned(entry.held.num_bytes) for shard in shards.values()})
    return replace(entry, shards=shards)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def pack(bucket: Bucket, rank: int, tensors: Mapping[str, Tensor], window: Tensor) -> None:
    """Copy what ``rank`` sends into its ``window`` (uint8, at least ``bucket.num_bytes``)."""
    for entry in bucket.entries:
        for shard in entry.shards.values():
            if shard.sender == rank:
                view(window, entry, shard).copy_(tensors[entry.held.mcore].detach())


def view(window: Tensor, entry: Entry, shard: Shard) -> Tensor:
    """A shard as it lies in the window of its sender."""
    flat = window[shard.start : shard.start + entry.held.num_bytes]
    return flat.view(entry.held.dtype).view(entry.held.shape)


def assemble(
    bucket: Bucket, shard_of: Callable[[Entry, int], Tensor], device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """The HF tensors of a bucket, each new and whole on ``device``; ``shard_of`` gives the shards of an entry."""
    stacks = _Stacks(device)
    for entry in bucket.entries:
        for index in range(len(entry.hf)):

            def write(part: Tensor, entry: Entry = entry, index: int = index) -> None:
                for copy in entry.trace.to_hf:
                    if copy.part == index:
                        copy.of_part(part).copy_(copy.of_shard(shard_of(entry, copy.shard)))

            yield from stacks.put(entry, index, write)


class _Stacks:
    """HF tensors in the making: whole ones at once, those of all experts when their last entry has come."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: dict[str, tuple[Tensor, set[int]]] = {}

    def put(self, entry: Entry, index: int, write: Callable[[Tensor], object]) -> Iterator[tuple[str, Tensor]]:
        """Make room for a part of ``entry``, let ``write`` fill it, and give the HF tensor if that was all of it."""
        name, number = unstacked(entry.hf[index])
        shape, dtype = entry.trace.part_shapes[index], entry.held.dtype
        if number is None:
            part = torch.empty(shape, dtype=dtype, device=self._device)
            write(part)
            yield name, part
            yield from ((copy, part.clone()) for copy in entry.copies[: None if index == 0 else 0])
            return
        if name not in self._open:
            self._open[name] = torch.empty((entry.stack, *shape), dtype=dtype, device=self._device), set()
        whole, come = self._open[name]
        write(whole[number])
        come.add(number)
        if len(come) == entry.stack:
            del self._open[name]
            yield name, whole
