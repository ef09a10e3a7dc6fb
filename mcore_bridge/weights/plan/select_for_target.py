"""Selects the parts of parameters that a receiver gets, for each kind of target.

Ranks that share get each HF tensor on one of them. If the target is an engine map, the rank gets only the slices that
this rank of the engine uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from mcore_bridge.errors import TargetError
from mcore_bridge.rules.mapping import ModelAxes, WeightMapping, unstacked
from mcore_bridge.weights.plan.engine_map import EngineMap
from mcore_bridge.weights.plan.engine_slices import Indices, Slicer, dims_of, sliced_shards
from mcore_bridge.weights.plan.inventory import ParamEntry
from mcore_bridge.weights.plan.map_slices import MapSlices
from mcore_bridge.weights.plan.payload import Payload
from mcore_bridge.weights.plan.target import EngineRank, Target

MOST_TOGETHER = 256 << 20
"""Experts of a layer are dealt one by one if all of them take more bytes."""


def select_for(
    target: Target, mapping: WeightMapping, axes: ModelAxes, num_layers: int, entries: Sequence[ParamEntry]
) -> Sequence[ParamEntry]:
    """Select the parts of ``entries`` for ``target``, in their order. An engine's rank has an entry for each shard.

    Raises:
        TargetError: when the model cannot be cut for the target, or ``target`` is no target.
    """
    if isinstance(target, EngineRank):
        return tuple(Slicer(target, mapping, axes, num_layers).slices(entries))
    if isinstance(target, EngineMap):
        return tuple(_by_map(target, entries))
    if target not in ("everything", "nothing"):
        raise TargetError(
            f'expected target="everything", "nothing", "share", an EngineRank or an EngineMap, found {target!r}: '
            "pass one of them"
        )
    return entries if target == "everything" else ()


def dealt(entries: Sequence[ParamEntry], ranks: Sequence[int]) -> dict[int, list[ParamEntry]]:
    """Deal the HF tensors of ``entries`` to ranks, by size. What an engine fuses in one load call stays together.

    A rank that holds a tensor whole gets it, as long as it has no more than an equal share.
    """
    if not ranks:
        return {}
    payload = Payload.of(entries)
    keys = payload.load_groups(MOST_TOGETHER)
    holders: dict[object, set[int]] = {}
    for key, entry in zip(keys, entries, strict=True):
        holders.setdefault(key, {*ranks}).intersection_update(*entry.holders.values())
    sizes = payload.sizes_together(keys)
    loads, equal = dict.fromkeys(ranks, 0), sum(sizes.values()) / len(ranks)
    owner = {}
    for key in sorted(sizes, key=sizes.__getitem__, reverse=True):
        near = [rank for rank in ranks if rank in holders[key] and loads[rank] + sizes[key] <= equal]
        owner[key] = min(near or ranks, key=loads.__getitem__)
        loads[owner[key]] += sizes[key]
    shares: dict[int, list[ParamEntry]] = {rank: [] for rank in ranks}
    for key, entry in zip(keys, entries, strict=True):
        shares[owner[key]].append(entry)
    return shares


def _by_map(target: EngineMap, entries: Sequence[ParamEntry]) -> Iterator[ParamEntry]:
    """Yield the parts of ``entries`` that a rank of an engine uses, in their order, with one entry for each shard.

    An HF tensor is cut along the dim along which megatron-core cuts it. A stack of experts is also cut along the
    experts.

    Raises:
        TargetError: when the map was made for HF tensors of other names or shapes.
    """
    _check(target, entries)
    slices = MapSlices(target)
    for entry in entries:
        cut = _cut(slices, entry)
        if cut is None:
            continue
        entry, taken = cut
        for shard, (traced, starts) in sliced_shards(entry.trace, taken).items():
            holders = {shard: entry.holders[shard]} if traced.to_hf else {}
            yield replace(entry, trace=traced, holders=holders, starts=starts)


def _check(target: EngineMap, entries: Sequence[ParamEntry]) -> None:
    shapes = {name: output.shape for output in Payload.of(entries).outputs for name in output.names}
    expected = {spec.name: tuple(spec.shape) for spec in target.sources}
    wrong = [
        f"{name}: expected {expected.get(name, 'no such HF tensor')}, found {shapes.get(name, 'none')}"
        for name in {**expected, **shapes}
        if expected.get(name) != shapes.get(name)
    ]
    if wrong:
        raise TargetError(
            f"the engine's map was made for other HF tensors: {'; '.join(wrong[:8])} ({len(wrong)} in all). Make it "
            "from the manifest of these models, with the same expert_format="
        )


def _cut(slices: MapSlices, entry: ParamEntry) -> tuple[ParamEntry, list[Indices]] | None:
    """An entry with the used names and the used indices of each part; None if nothing is used."""
    names = [name for name in (unstacked(entry.hf[0])[0], *entry.copies) if slices.is_used(name)]
    if not names and not any(slices.is_used(unstacked(name)[0]) for name in entry.hf[1:]):
        return None
    if len(names) > 1:  # the tensor is written under several names, so all of it is sent
        others = tuple(name for name in names if name in entry.copies and name != names[0])
        first = entry.hf[0] if names[0] not in entry.copies else names[0]
        entry = replace(entry, hf=(first, *entry.hf[1:]), copies=others)
        return entry, _whole(entry)
    if entry.copies:
        entry = replace(
            entry, hf=(*names, *entry.hf[1:]) if names and names[0] in entry.copies else entry.hf, copies=()
        )
    return _of_stack(slices, entry) if entry.stack else (entry, _taken(slices, entry))


def _taken(slices: MapSlices, entry: ParamEntry) -> list[Indices]:
    return [slices.taken(name, (dim,))[0] for name, dim in zip(entry.hf, dims_of(entry.trace), strict=True)]


def _whole(entry: ParamEntry) -> list[Indices]:
    return [np.arange(shape[dim]) for shape, dim in zip(entry.trace.part_shapes, dims_of(entry.trace), strict=True)]


def _of_stack(slices: MapSlices, entry: ParamEntry) -> tuple[ParamEntry, list[Indices]] | None:
    """Like ``_cut`` for parts of stacked experts: the experts of this rank get new numbers."""
    pairs = [unstacked(name) for name in entry.hf]
    taken = [slices.taken(name, (0, dim + 1)) for (name, _), dim in zip(pairs, dims_of(entry.trace), strict=True)]
    experts = [of_part[0].tolist() for of_part in taken]
    if any(of_part != experts[0] for of_part in experts):
        return entry, _whole(entry)
    number = pairs[0][1]
    if number not in experts[0]:
        return None
    hf = tuple(f"{name}[{experts[0].index(number)}]" for name, _ in pairs)
    return replace(entry, hf=hf, stack=len(experts[0])), [of_part[1] for of_part in taken]
