"""Traces: the effect of a layout, as data. The layout runs on coordinates, and the result shows which elements go
where.

Every layout moves whole slices along one dim (of a view, such as the transpose), so a trace is a short list of
``Copy``. By a trace, a load reads from a file only the slices of its rank, and writes them straight into place. An
export copies each byte of an HF tensor once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from mcore_bridge.errors import MappingError
from mcore_bridge.rules.layout import Axes, Chain, Layout, Rearrange

Shape = tuple[int, ...]
_PIECE = 1 << 22
"""Coordinates that are compared at once. A table of n-grams may have 320 million rows."""


@dataclass(frozen=True, slots=True)
class Copy:
    """One slice: ``size`` elements along ``dim`` that a part and a shard have in common.

    In the shard they begin at ``shard_start``. In the part they begin at ``part_start``, ``part_step`` apart, after the
    part was rearranged by ``view``.
    """

    part: int
    shard: int
    dim: int
    part_start: int
    shard_start: int
    size: int
    part_step: int = 1
    view: Rearrange | None = None

    @property
    def part_dim(self) -> int:
        """The dim of the part, before ``view``, along which ``part_start`` counts."""
        if self.view is None:
            return self.dim
        return self.view.left.split().index(self.view.right.split()[self.dim])

    def of_part(self, part: Tensor) -> Tensor:
        """The slice of the HF tensor, as a view in the orientation of the shard."""
        part = _viewed(part, self.view)
        stop = self.part_start + (self.size - 1) * self.part_step + 1
        return part[(slice(None),) * self.dim + (slice(self.part_start, stop, self.part_step),)]

    def of_shard(self, shard: Tensor) -> Tensor:
        """The slice of the mcore shard, as a view."""
        return shard.narrow(self.dim, self.shard_start, self.size)


@dataclass(frozen=True, slots=True)
class Trace:
    """A layout at given sizes: the shapes on both sides, and the copies that carry it out in either direction.

    ``to_mcore`` writes every element of every shard, replicas too, but no padding. ``to_hf`` writes every element of
    every part exactly once. It takes a replicated element from the first shard that has it.
    """

    part_shapes: tuple[Shape, ...]
    shard_shape: Shape
    to_mcore: tuple[Copy, ...]
    to_hf: tuple[Copy, ...]

    def padding(self, shard: int) -> tuple[tuple[int, int, int], ...]:
        """``(dim, start, size)`` of the ranges of a shard that come from no part."""
        copies = sorted((c for c in self.to_mcore if c.shard == shard), key=lambda copy: copy.shard_start)
        dim = self.to_mcore[0].dim
        ends = [0, *(copy.shard_start + copy.size for copy in copies)]
        starts = [*(copy.shard_start for copy in copies), self.shard_shape[dim]]
        return tuple((dim, end, start - end) for end, start in zip(ends, starts, strict=True) if start > end)

    def shard(self, number: int, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Make shard ``number`` from whole parts, on their device. Elements that come from no part are zero."""
        result = torch.zeros(self.shard_shape, dtype=dtype, device=parts[0].device)
        for copy in self.to_mcore:
            if copy.shard == number:
                copy.of_shard(result).copy_(copy.of_part(parts[copy.part]))
        return result

    def part(self, number: int, shards: Mapping[int, Tensor]) -> Tensor:
        """Make part ``number`` from the shards, given by number, on their device."""
        result = torch.empty(self.part_shapes[number], dtype=shards[0].dtype, device=shards[0].device)
        for copy in self.to_hf:
            if copy.part == number:
                copy.of_part(result).copy_(copy.of_shard(shards[copy.shard]))
        return result


def trace(layout: Layout, shard_shape: Shape, axes: Axes) -> Trace:
    """Trace ``layout`` for shards of ``shard_shape`` (one rank's parameter).

    Raises:
        MappingError: the layout cannot make shards of that shape at these sizes of axes.
    """
    return _trace(layout, tuple(shard_shape), tuple(sorted(axes.items())))


@lru_cache(maxsize=4096)
def _trace(layout: Layout, shard_shape: Shape, sizes: tuple[tuple[str, int], ...]) -> Trace:
    axes = dict(sizes)
    shards = torch.empty((axes["tp"], *shard_shape), device="meta")
    try:
        part_shapes = tuple(tuple(part.shape) for part in (~layout)((shards,), axes))
        shapes = tuple(tuple(whole.shape) for whole in layout(tuple(shards.new_empty(s) for s in part_shapes), axes))
    except (MappingError, ValueError, RuntimeError) as error:  # einops raises EinopsError, a RuntimeError
        raise MappingError(f"shards of shape {shard_shape} do not fit {layout} at {axes}: {error}") from None
    if shapes != ((axes["tp"], *shard_shape),):
        raise MappingError(f"{layout} at {axes} gives {shapes}, not {axes['tp']} shards of shape {shard_shape}")
    steps = layout.steps if isinstance(layout, Chain) else (layout,)
    first = steps[0]
    view = first if isinstance(first, Rearrange) and "(" not in first.left + first.right else None
    viewed = tuple(tuple(_viewed(torch.empty(shape, device="meta"), view).shape) for shape in part_shapes)
    to_mcore = tuple(_to_mcore(Chain(steps[view is not None :]), viewed, axes, view))
    return Trace(part_shapes, shard_shape, to_mcore, _to_hf(layout, to_mcore, viewed))


def _viewed(part: Tensor, view: Rearrange | None) -> Tensor:
    """``part`` in the orientation of the shard."""
    return part if view is None else view((part,), {})[0]


def moved_dim(layout: Layout) -> int:
    """The dim along which a layout cuts and joins: the position of the parentheses in its patterns."""
    sides = [s.removeprefix("tp ") for step in _rearranges(layout) for s in (step.left, step.right)]
    dims = {side[: side.index("(")].count(" ") for side in sides if "(" in side} or {0}
    if len(dims) > 1:
        raise MappingError(f"{layout} moves elements along dims {sorted(dims)}; express it as a layout along one dim")
    return dims.pop()


def _rearranges(layout: Layout) -> Iterator[Rearrange]:
    for step in layout.steps if isinstance(layout, Chain) else (layout,):
        if isinstance(step, Rearrange):
            yield step


def _to_mcore(layout: Chain, shapes: tuple[Shape, ...], axes: Axes, view: Rearrange | None) -> Iterator[Copy]:
    dim = moved_dim(layout)
    lengths = [shape[dim] for shape in shapes]
    (shards,) = layout(lines(shapes, dim), axes)
    for index, shard in enumerate(shards):
        runs = [(position, *_locate(value, lengths), size) for position, value, size in _runs(shard.flatten())]
        for position, part, offset, step, size in _strided(runs):
            yield Copy(part, index, dim, offset, position, size, step, view)


def _to_hf(layout: Layout, to_mcore: tuple[Copy, ...], shapes: tuple[Shape, ...]) -> tuple[Copy, ...]:
    """Copies that write each element of each part once, from the first shard that has it."""
    first: dict[object, Copy] = {}
    for copy in to_mcore:
        first.setdefault((copy.part, copy.part_start, copy.part_step, copy.size), copy)
    for part, shape in enumerate(shapes):
        copies = [copy for copy in first.values() if copy.part == part]
        if sum(copy.size for copy in copies) != shape[copies[0].dim if copies else 0]:
            raise MappingError(f"{layout} does not give back every element of its part {part} exactly once")
    return tuple(first.values())


def lines(shapes: Sequence[Shape], dim: int) -> tuple[Tensor, ...]:
    """Parts that hold the coordinates of their elements along ``dim``. Each part begins at its line start."""
    return tuple(
        _line(shape, dim, start) for shape, start in zip(shapes, line_starts([s[dim] for s in shapes]), strict=True)
    )


def _line(shape: Shape, dim: int, start: int) -> Tensor:
    """Coordinates ``start, start + 1, ...`` along ``dim`` of ``shape``; the other dims stay whole and shrink to 1."""
    view = [1] * len(shape)
    view[dim] = shape[dim]
    end = start + shape[dim]
    return torch.arange(start, end, dtype=torch.int32 if end < 1 << 31 else torch.int64).view(view)


def line_starts(lengths: Sequence[int]) -> list[int]:
    """The first coordinate of each part. 0 means padding. Gaps keep the runs of different parts apart."""
    starts = [2]
    for length in lengths[:-1]:
        starts.append(starts[-1] + length + 1)
    return starts


def _locate(value: int, lengths: list[int]) -> tuple[int, int]:
    starts = line_starts(lengths)
    index = max(i for i, start in enumerate(starts) if start <= value)
    return index, value - starts[index]


def _runs(line: Tensor) -> Iterator[tuple[int, int, int]]:
    """``(position, coordinate, length)`` of each run of consecutive coordinates, without padding."""
    edges = [0, *_breaks(line), len(line)]
    for start, stop in pairwise(edges):
        if start < stop and line[start]:
            yield start, int(line[start]), stop - start


def _breaks(line: Tensor) -> Iterator[int]:
    """Positions of coordinates that do not follow the one before. One piece of the line at a time needs memory."""
    for start in range(0, len(line) - 1, _PIECE):
        piece = line[start : start + _PIECE + 1]
        yield from ((piece[1:] - piece[:-1] != 1).nonzero().flatten() + (start + 1)).tolist()


def _strided(runs: Iterable[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int, int]]:
    """``(position, part, offset, step, size)``. Single elements of a part at equal distances become one run."""
    strided: list[tuple[int, int, int, int, int]] = []
    for position, part, offset, size in runs:
        if strided and size == 1:
            last, last_part, start, step, count = strided[-1]
            step = offset - start if count == 1 else step
            if last + count == position and part == last_part and step > 1 and offset == start + step * count:
                strided[-1] = (last, part, start, step, count + 1)
                continue
        strided.append((position, part, offset, 1, size))
    return strided
