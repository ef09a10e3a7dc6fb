"""Cuts parameters for a rank of an engine: the slices of a trainer's shards that become slices of HF tensors.

The cuts of an engine follow from the layouts at the engine's sizes, and the cuts of a trainer from the layouts at the
trainer's sizes. So any trainer fits any engine: a slice is assembled from its parts in all shards.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch

from mcore_bridge.errors import TargetError
from mcore_bridge.rules.layout import COLUMN, GROUPS, Axes, Chain, Concat, Layout
from mcore_bridge.rules.mapping import ModelAxes, Rule, WeightMapping, unstacked
from mcore_bridge.rules.names import expert_of, layer_of
from mcore_bridge.rules.trace import Copy, Shape, Trace, line_starts, lines, trace
from mcore_bridge.weights.plan.encoded_entries import cells_of, upright_of
from mcore_bridge.weights.plan.inventory import ParamEntry
from mcore_bridge.weights.plan.target import EngineRank

Indices = np.ndarray[tuple[int], np.dtype[np.int64]]
Sizes = tuple[tuple[str, int], ...]
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")
_PADDED = "padded_"
"""The prefix of axes that are a vocabulary with its padding."""
_HEADS = "heads_per_group"
_QUERIES = frozenset({_HEADS, "query_rows"})
"""The axes of query heads, and of their rows, in a group."""


class Slicer:
    """Cuts parameters for one target. Equal layers and experts are computed once."""

    def __init__(self, target: EngineRank, mapping: WeightMapping, axes: ModelAxes, num_layers: int) -> None:
        _check(target, axes)
        self._target, self._mapping, self._axes = target, mapping, axes
        self._stage, self._experts = target.stage(num_layers), target.experts(axes["experts"])
        self._tied = any(rule.mcore == "output_layer.weight" and not rule.exported for rule in mapping.rules)
        self._known: dict[tuple[object, ...], dict[int, tuple[Trace, tuple[int, ...]]]] = {}

    def slices(self, entries: Sequence[ParamEntry]) -> Iterator[ParamEntry]:
        """Yield the parts of ``entries`` that the target takes, in their order, with one entry for each shard."""
        for entry in filter(None, map(self.named, entries)):
            for shard, (traced, starts) in self._sliced(entry).items():
                holders = {shard: entry.holders[shard]} if traced.to_hf else {}
                yield replace(entry, trace=traced, holders=holders, starts=starts)

    def named(self, entry: ParamEntry) -> ParamEntry | None:
        """The entry with the names that it has on the target; None if the target does not have it."""
        mcore, target = entry.held.name, self._target
        layer, expert = layer_of(mcore), expert_of(mcore)
        if mcore.startswith("embedding."):
            return self._embedding(entry)
        if (not target.is_last_stage) if layer is None else (layer not in self._stage):
            return None
        if layer is not None and target.local_names:
            local = str(layer - self._stage.start)
            entry = replace(entry, hf=tuple(_LAYER.sub(local, name, count=1) for name in entry.hf))
        if expert is not None and expert not in self._experts:
            return None
        if not entry.stack:  # a tensor of one layer or expert; stacks get new numbers of experts
            return entry
        first = self._experts.start
        names = map(unstacked, entry.hf)
        hf = tuple(name if number is None else f"{name}[{number - first}]" for name, number in names)
        return replace(entry, hf=hf, stack=len(self._experts))

    def _embedding(self, entry: ParamEntry) -> ParamEntry | None:
        """The embedding on the target. The last stage also has it, for MTP layers and a tied head."""
        target = self._target
        if target.is_first_stage:
            return entry if target.is_last_stage else replace(entry, copies=())
        if not target.is_last_stage:
            return None
        if self._tied:
            return entry
        return replace(entry, hf=entry.copies[:1], copies=entry.copies[1:]) if entry.copies else None

    def _sliced(self, entry: ParamEntry) -> dict[int, tuple[Trace, tuple[int, ...]]]:
        """For each shard, the trace of the part that the target takes, and the start of each copy in the sent bytes."""
        rule = self._mapping.rule_of(entry.plain.held.name)
        key = (id(entry.trace), id(rule), self._cuts(entry, rule))
        if key not in self._known:
            self._known[key] = sliced_shards(entry.trace, self.taken(entry))
        return self._known[key]

    def _cuts(self, entry: ParamEntry, rule: Rule) -> tuple[tuple[int, int], ...]:
        """For each part, the number of ranks that share it, and the target's rank among them."""
        return tuple(self._target.cut(unstacked(name)[0], routed=rule.axis == "etp") for name in entry.hf)

    def _coarse(self, entry: ParamEntry) -> tuple[Indices, ...]:
        """The indices of codes or scales that the target takes, for the numbers that it takes."""
        encoded = entry.encoded
        assert encoded is not None
        taken = self.taken(encoded.plain)
        return tuple(_in_cells(entry, part, taken[number]) for part, number in enumerate(encoded.parts))

    def taken(self, entry: ParamEntry) -> tuple[Indices, ...]:
        """The indices that the target takes of each part, along the dim that is cut."""
        if entry.encoded is not None:
            return self._coarse(entry)
        rule, shapes = self._mapping.rule_of(entry.held.name), entry.trace.part_shapes
        axes = self._axes.of(entry.held.name, rule.axis)
        indices = []
        for part, (tp, rank) in enumerate(self._cuts(entry, rule)):
            padded = {name: axes[name.removeprefix(_PADDED)] for name in axes if name.startswith(_PADDED)}
            sizes = {**axes, **{name: self._target.padded(rows, tp) for name, rows in padded.items()}}
            try:
                indices.append(_taken(rule.layout, shapes, tuple(sorted(sizes.items())), tp, rank)[part])
            except (LookupError, ValueError, RuntimeError) as error:  # einops raises EinopsError, a RuntimeError
                raise TargetError(
                    f"{entry.hf[part]} of shape {list(shapes[part])} cannot be cut for {tp} ranks of the engine, "
                    "which must divide the heads, or the rows of an MLP. Change tp, or etp of the experts, or name "
                    f"it in whole= ({str(error).strip().splitlines()[-1]})"
                ) from None
        return tuple(indices)


def _in_cells(entry: ParamEntry, part: int, indices: Indices) -> Indices:
    """The elements of codes or scales that stand for ``indices`` of the weight.

    Raises:
        TargetError: when some of the numbers for which an element stands are not taken.
    """
    encoded, dim = entry.encoded, dims_of(entry.trace)[part]
    assert encoded is not None
    encoding, length = encoded.encodings[part], entry.trace.part_shapes[part][dim]
    if encoded.role in ("overall", "constant") or (encoded.role == "scales" and length == 1):
        return np.arange(length)
    plain = encoded.plain.trace
    whole = plain.part_shapes[encoded.parts[part]][dims_of(plain)[encoded.parts[part]]]
    moved = plain.to_mcore[0].dim
    cell = whole // length if encoded.role == "codes" else cells_of(upright_of(plain, encoding), encoding)[moved]
    cells = np.unique(indices // cell)
    if (np.minimum((cells + 1) * cell, whole) - cells * cell).sum() != len(indices):
        raise TargetError(
            f"{entry.hf[part]} cannot be cut for the engine: a cut after {len(indices)} of {whole} numbers lies within "
            f"{cell} that are encoded together. Change tp (or etp of the experts), so that the parts are multiples of "
            f"{cell}, or name it in whole="
        )
    return cells


def _check(target: EngineRank, axes: ModelAxes) -> None:
    wrong = []
    for sizes in (axes, *axes.layers.values()):
        groups, heads = sizes["groups"], sizes["groups"] * sizes[_HEADS]
        if heads % target.tp:
            wrong.append(f"tp={target.tp} does not divide {heads} attention heads")
        if groups % target.tp and target.tp % groups:
            wrong.append(f"neither of tp={target.tp} and {groups} KV heads divides the other")
    if target.ep > max(axes["experts"], 1):
        wrong.append(f"ep={target.ep} is more than {axes['experts']} experts")
    if axes.get("key_heads", 0) % target.tp:
        wrong.append(f"tp={target.tp} does not divide {axes['key_heads']} key heads of linear attention")
    if wrong:
        raise TargetError(
            f"the model cannot be cut for this engine: {'; '.join(dict.fromkeys(wrong))}; change the sizes"
        )


def dims_of(traced: Trace) -> list[int]:
    """For each part, the dim along which its elements move."""
    dims = {copy.part: copy.part_dim for copy in traced.to_mcore}
    return [dims[part] for part in range(len(traced.part_shapes))]


def sliced_shards(traced: Trace, taken: Sequence[Indices]) -> dict[int, tuple[Trace, tuple[int, ...]]]:
    """For each shard, the trace of the part that is taken, and the start of each copy in the sent bytes.

    Args:
        taken: the indices of each part that are taken, along the dim that is cut.
    """
    positions = []
    shapes = []
    for shape, dim, indices in zip(traced.part_shapes, dims_of(traced), taken, strict=True):
        position = np.full(shape[dim], -1)
        position[indices] = np.arange(len(indices))
        positions.append(position)
        shapes.append((*shape[:dim], len(indices), *shape[dim + 1 :]))
    by_shard: dict[int, list[Copy]] = {}
    for copy in sorted(traced.to_hf, key=lambda copy: copy.shard_start):
        stop = copy.part_start + (copy.size - 1) * copy.part_step + 1
        for offset, size, first, step in _runs(positions[copy.part][copy.part_start : stop : copy.part_step]):
            part = replace(copy, part_start=first, part_step=step, shard_start=copy.shard_start + offset, size=size)
            by_shard.setdefault(copy.shard, []).append(part)
    if not by_shard:  # an empty slice, such as the last rank's slice of a small vocabulary
        by_shard[0] = []
    sliced = {}
    for shard, copies in sorted(by_shard.items()):
        starts = np.cumsum([0, *(copy.size for copy in copies)])[:-1].tolist()
        sliced[shard] = Trace(tuple(shapes), traced.shard_shape, (), tuple(copies)), tuple(starts)
    return sliced


def _runs(positions: Indices) -> Iterator[tuple[int, int, int, int]]:
    """Yield ``(offset, size, position, step)`` for each run of neighbours whose positions are equally far apart.

    Args:
        positions: the target position of each element; below 0 if it is not taken.
    """
    taken = np.flatnonzero(positions >= 0)
    for neighbours in np.split(taken, np.flatnonzero(np.diff(taken) != 1) + 1):
        steps = np.diff(positions[neighbours])
        changes = [*(np.flatnonzero(np.diff(steps)) + 1).tolist(), len(steps)]
        start = 0
        while start < len(neighbours):
            last = next((change for change in changes if change > start), start)
            first = int(positions[neighbours[start]])
            yield int(neighbours[start]), last - start + 1, first, int(steps[start]) if last > start else 1
            start = last + 1


@lru_cache(maxsize=4096)
def _taken(layout: Layout, part_shapes: tuple[Shape, ...], sizes: Sizes, tp: int, rank: int) -> tuple[Indices, ...]:
    """The indices that rank ``rank`` of ``tp`` has of each part, along the dim of the layout, ascending."""
    axes = {**dict(sizes), "tp": tp}
    if isinstance(layout, Chain) and len(layout.steps) > 2:
        joined = layout.steps[-3]
        if isinstance(joined, Concat) and _QUERIES & {*joined.ratio} and tp > axes["groups"]:
            return _repeated(layout, joined, part_shapes, axes, rank)
    (shards,) = layout(tuple(torch.empty(shape, device="meta") for shape in part_shapes), axes)
    copies = [copy for copy in trace(layout, tuple(shards.shape[1:]), axes).to_mcore if copy.shard == rank]
    indices: list[list[Indices]] = [[np.arange(0)] for _ in part_shapes]
    for copy in copies:
        indices[copy.part].append(copy.part_start + copy.part_step * np.arange(copy.size))
    return tuple(np.sort(np.concatenate(of_part)) for of_part in indices)


def _repeated(
    layout: Chain, joined: Concat, part_shapes: Sequence[Shape], axes: Axes, rank: int
) -> tuple[Indices, ...]:
    """Like ``_taken`` with more ranks than KV heads: ranks share a group, cut queries, and repeat keys and values."""
    assert layout.steps[-2:] == (~GROUPS, COLUMN)
    share = axes["tp"] // axes["groups"]
    (groups,) = Chain(layout.steps[:-2])(lines(part_shapes, 0), axes)
    group = groups[rank // share].flatten().numpy()
    ratio = [axes[size] if isinstance(size, str) else size for size in joined.ratio]
    sections = np.split(group, np.cumsum(ratio)[:-1] * (len(group) // sum(ratio)))
    kept = np.concatenate(
        [
            section.reshape(share, -1)[rank % share] if size in _QUERIES else section
            for section, size in zip(sections, joined.ratio, strict=True)
        ]
    )
    lengths = [shape[0] for shape in part_shapes]
    starts = line_starts(lengths)
    return tuple(
        np.sort(kept[(kept >= start) & (kept < start + length)] - start)
        for start, length in zip(starts, lengths, strict=True)
    )
