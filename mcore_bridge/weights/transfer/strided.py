"""Copies of a layout as moves of bytes: one rectangle where at most two dims are left after merging, or several."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from mcore_bridge.rules.trace import Copy
from mcore_bridge.weights.plan.inventory import ParamEntry
from mcore_bridge.weights.plan.stream import WindowSlice
from mcore_bridge.weights.transfer.byte_copy import ByteCopy

Side = Literal["held", "sent", "part"]
"""Where an element is: in the tensor of a rank, in what travels of it, in the HF tensor."""


def moves_of(
    entry: ParamEntry, piece: WindowSlice, copy: Copy, start: int, source: Side, target: Side
) -> Iterator[ByteCopy]:
    """What of ``copy``, which begins at ``start`` in what travels, lies in the rows of ``piece``."""
    offset = start if copy.dim == 0 else 0  # the row of what travels that is row 0 of the views
    near, far = (_view(entry, copy, start, place) for place in (source, target))
    first = max(piece.first, offset) - offset
    last = min(piece.first + piece.count, offset + near.shape[0]) - offset
    if first >= last:
        return
    item = entry.held.dtype.itemsize
    before = {"held": 0, "sent": piece.first * entry.row_bytes, "part": 0}
    yield from _rectangles(
        (last - first, *near.shape[1:]),
        [stride * item for stride in near.stride()],
        [stride * item for stride in far.stride()],
        int(near.storage_offset() + first * near.stride(0)) * item - before[source],
        int(far.storage_offset() + first * far.stride(0)) * item - before[target],
        item,
    )


def _view(entry: ParamEntry, copy: Copy, start: int, place: Side) -> Tensor:
    """The elements of ``copy`` at a place, without storage."""
    if place == "held":
        return copy.of_shard(torch.empty(entry.held.shape, device="meta"))
    if place == "sent":
        return torch.empty(entry.sent, device="meta").narrow(copy.dim, start, copy.size)
    return copy.of_part(torch.empty(entry.trace.part_shapes[copy.part], device="meta"))


def _rectangles(
    shape: Sequence[int], source: Sequence[int], target: Sequence[int], start: int, target_start: int, item: int
) -> Iterator[ByteCopy]:
    """A copy between two strided views, as one move where at most two dims are left after merging, else several."""
    dims: list[tuple[int, int, int]] = []
    for size, near, far in zip(shape, source, target, strict=True):
        if dims and dims[-1][1:] == (size * near, size * far):
            dims[-1] = (dims[-1][0] * size, near, far)
        elif size > 1:
            dims.append((size, near, far))
    if len(dims) < 2:
        run = bool(dims) and dims[0][1:] == (item, item)
        dims = [(1, 0, 0), *dims] if run else [*(dims or [(1, 0, 0)]), (1, item, item)]
    *outer, rows, cols = dims
    for index in np.ndindex(*(size for size, _, _ in outer)):
        yield ByteCopy(
            *(0, start + sum(i * near for i, (_, near, _) in zip(index, outer, strict=True))),
            *(0, target_start + sum(i * far for i, (_, _, far) in zip(index, outer, strict=True))),
            *(rows[0], cols[0], item, rows[1], cols[1], rows[2], cols[2]),
        )


def stacked(moves: Iterable[ByteCopy]) -> list[ByteCopy]:
    """The same moves, where equal runs at equal distances are the rows of one."""
    found: list[ByteCopy] = []
    for move in moves:
        joined = _joined(found[-1], move) if found else None
        found[-1 if joined else len(found) :] = [joined or move]
    return found


def _joined(found: ByteCopy, move: ByteCopy) -> ByteCopy | None:
    """``found`` with the one row of ``move`` below its own, if it stands where that would."""
    if move.rows != 1 or (move.cols, move.item) != (found.cols, found.item):
        return None
    if (move.source_col, move.target_col) != (found.source_col, found.target_col):
        return None
    near = (move.source_start - found.source_start) // found.rows
    far = (move.target_start - found.target_start) // found.rows
    if min(near, far) < 0 or (found.rows > 1 and (found.source_row, found.target_row) != (near, far)):
        return None
    ends = (found.source_start + near * found.rows, found.target_start + far * found.rows)
    if ends != (move.source_start, move.target_start):
        return None
    return found._replace(rows=found.rows + 1, source_row=near, target_row=far)
