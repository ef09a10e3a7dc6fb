"""A strided copy as rectangles of bytes: one if at most two dims are left after merging, else several.

Needs numpy only: an engine's process imports it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from mcore_bridge.weights.transfer.byte_copy import ByteCopy


def rectangles(
    shape: Sequence[int], source: Sequence[int], target: Sequence[int], start: int, target_start: int, item: int
) -> Iterator[ByteCopy]:
    """Yield the copies between two strided views: one if at most two dims are left after merging, else several."""
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


def stacked(byte_copies: Iterable[ByteCopy]) -> list[ByteCopy]:
    """Join copies of equal rows at equal distances into one copy of many rows."""
    joined: list[ByteCopy] = []
    for byte_copy in byte_copies:
        longer = _with_row(joined[-1], byte_copy) if joined else None
        joined[-1 if longer else len(joined) :] = [longer or byte_copy]
    return joined


def _with_row(joined: ByteCopy, byte_copy: ByteCopy) -> ByteCopy | None:
    """Add the one row of ``byte_copy`` below the rows of ``joined``; None if it does not lie there."""
    if byte_copy.rows != 1 or (byte_copy.cols, byte_copy.item) != (joined.cols, joined.item):
        return None
    if (byte_copy.source, byte_copy.target) != (joined.source, joined.target):
        return None
    if (byte_copy.source_col, byte_copy.target_col) != (joined.source_col, joined.target_col):
        return None
    near = (byte_copy.source_start - joined.source_start) // joined.rows
    far = (byte_copy.target_start - joined.target_start) // joined.rows
    if min(near, far) < 0 or (joined.rows > 1 and (joined.source_row, joined.target_row) != (near, far)):
        return None
    ends = (joined.source_start + near * joined.rows, joined.target_start + far * joined.rows)
    if ends != (byte_copy.source_start, byte_copy.target_start):
        return None
    return joined._replace(rows=joined.rows + 1, source_row=near, target_row=far)
