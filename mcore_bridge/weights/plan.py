"""Which shards travel together and what they become: data, the same on every rank, made without a process group.

Every rank of a group sends one window of bytes per bucket, all at the same time, so that all pipeline stages send at
once. A bucket holds whole parameters: what an engine fuses in one load call (q, k and v; gate and up) never straddles
two buckets, whatever their size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_bridge.errors import MappingError
from mcore_bridge.weights.layout import Axes
from mcore_bridge.weights.mapping import WeightMapping
from mcore_bridge.weights.names import layer_of
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
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Inventory:
    """All that one rank holds, in order, and where it stands in the mesh."""

    pp_rank: int
    tp_rank: int
    held: tuple[Held, ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """Where a shard lies: in the window of the group's rank ``sender``, from byte ``start`` on."""

    sender: int
    start: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter on its way: its HF names, what its layout does, and its shards by tensor-parallel rank.

    A shard that no HF tensor takes anything from (a replica) does not travel and is not listed.
    """

    held: Held
    hf: tuple[str, ...]
    trace: Trace
    shards: Mapping[int, Shard]


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
            for entry in bucket.entries:
                for name, shape in zip(entry.hf, entry.trace.part_shapes, strict=True):
                    yield name, shape, entry.held.dtype


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
    _check_layers(num_layers, entries)
    _check_unique(entries)
    lanes: dict[int, list[Entry]] = {}
    for entry in entries:
        lane = inventories[min(shard.sender for shard in entry.shards.values())].pp_rank
        lanes.setdefault(lane, []).append(entry)
    window = bucket_bytes // len(inventories)
    return ExportPlan(tuple(_fill_buckets(list(lanes.values()), window)))


def _entries(mapping: WeightMapping, axes: Axes, inventories: Sequence[Inventory]) -> list[Entry]:
    holders: dict[str, dict[int, int]] = {}
    described: dict[str, Held] = {}
    for rank, inventory in enumerate(inventories):
        for held in inventory.held:
            if described.setdefault(held.mcore, held) != held:
                raise MappingError(
                    f"rank {rank} of the group holds {held}, another {described[held.mcore]}; make them equal"
                )
            holders.setdefault(held.mcore, {}).setdefault(inventory.tp_rank, rank)
    bindings = {name: mapping.bind(name) for name in described}
    return [
        _entry(described[name], binding.hf, trace(binding.layout, described[name].shape, axes), holders[name])
        for name, binding in bindings.items()
        if binding.exported
    ]


def _entry(held: Held, hf: tuple[str, ...], traced: Trace, holders: Mapping[int, int]) -> Entry:
    needed = sorted({copy.shard for copy in traced.to_hf})
    absent = [shard for shard in needed if shard not in holders]
    if absent:
        raise MappingError(f"no rank of the group holds the shards {absent} of {held.mcore}; is a rank missing in it?")
    return Entry(held, hf, traced, {shard: Shard(holders[shard], -1) for shard in needed})


def _check_layers(num_layers: int, entries: Sequence[Entry]) -> None:
    found = {layer for entry in entries if (layer := layer_of(entry.held.mcore)) is not None}
    if found != set(range(num_layers)):
        raise MappingError(
            f"the ranks of the group hold the layers {sorted(found)}, expected 0 to {num_layers - 1}; "
            "the model was not built whole, or a chunk was not passed"
        )


def _check_unique(entries: Sequence[Entry]) -> None:
    seen: dict[str, str] = {}
    for entry in entries:
        for name in entry.hf:
            if name in seen:
                raise MappingError(f"{name} would come from {seen[name]} and from {entry.held.mcore}; fix the rules")
            seen[name] = entry.held.mcore


def _fill_buckets(lanes: list[list[Entry]], window: int) -> Iterator[Bucket]:
    """Take from every lane (the parameters of one pipeline stage) as many entries as fit, until all are empty."""
    positions = [0] * len(lanes)
    while any(position < len(lane) for position, lane in zip(positions, lanes, strict=True)):
        filled: dict[int, int] = {}  # bytes by sender
        taken: list[Entry] = []
        for index, lane in enumerate(lanes):
            first = positions[index]
            while positions[index] < len(lane):
                entry = lane[positions[index]]
                sizes = {shard.sender: filled.get(shard.sender, 0) for shard in entry.shards.values()}
                size = _aligned(entry.held.num_bytes)
                if positions[index] > first and max(sizes.values()) + size > window:
                    break
                taken.append(_place(entry, filled, size))
                positions[index] += 1
        yield Bucket(tuple(taken), max(filled.values()))


def _place(entry: Entry, filled: dict[int, int], size: int) -> Entry:
    shards = {}
    for index, shard in entry.shards.items():
        shards[index] = Shard(shard.sender, filled.get(shard.sender, 0))
        filled[shard.sender] = shards[index].start + size
    return Entry(entry.held, entry.hf, entry.trace, shards)


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


def assemble(entry: Entry, shard_of: Callable[[int], Tensor], device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """The HF tensors of one parameter, each new and whole on ``device``; ``shard_of`` gives the shards."""
    for index, (name, shape) in enumerate(zip(entry.hf, entry.trace.part_shapes, strict=True)):
        part = torch.empty(shape, dtype=entry.held.dtype, device=device)
        for copy in entry.trace.to_hf:
            if copy.part == index:
                copy.of_part(part).copy_(copy.of_shard(shard_of(copy.shard)))
        yield name, part
