"""Copies of a layout as copies of bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from mcore_bridge.rules.trace import Copy
from mcore_bridge.weights.plan.inventory import ParamEntry
from mcore_bridge.weights.plan.stream import WindowSlice
from mcore_bridge.weights.transfer.byte_copy import ByteCopy
from mcore_bridge.weights.transfer.rectangles import rectangles

Side = Literal["held", "sent", "part"]
"""One of three buffers: the tensor that a rank holds, what travels of it, or a part, which is an HF tensor."""


def byte_copies_of(
    entry: ParamEntry, piece: WindowSlice, copy: Copy, start: int, source: Side, target: Side
) -> Iterator[ByteCopy]:
    """Yield the byte copies for what ``copy`` has in the rows of ``piece``.

    Args:
        start: where ``copy`` begins in what travels, along its dim.
        source, target: between which two tensors to copy.
    """
    offset = start if copy.dim == 0 else 0  # row 0 of the views is this row of what travels
    near, far = (_view(entry, copy, start, side) for side in (source, target))
    first = max(piece.first, offset) - offset
    last = min(piece.first + piece.count, offset + near.shape[0]) - offset
    if first >= last:
        return
    item = entry.held.dtype.itemsize
    before = {"held": 0, "sent": piece.first * entry.row_bytes, "part": 0}
    yield from rectangles(
        (last - first, *near.shape[1:]),
        [stride * item for stride in near.stride()],
        [stride * item for stride in far.stride()],
        int(near.storage_offset() + first * near.stride(0)) * item - before[source],
        int(far.storage_offset() + first * far.stride(0)) * item - before[target],
        item,
    )


def _view(entry: ParamEntry, copy: Copy, start: int, side: Side) -> Tensor:
    """The elements of ``copy`` on one side, as a view without storage."""
    if side == "held":
        return copy.of_shard(torch.empty(entry.held.shape, device="meta"))
    if side == "sent":
        return torch.empty(entry.sent, device="meta").narrow(copy.dim, start, copy.size)
    return copy.of_part(torch.empty(entry.trace.part_shapes[copy.part], device="meta"))
