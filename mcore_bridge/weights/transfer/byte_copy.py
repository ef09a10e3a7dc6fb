"""One strided copy of bytes between two buffers: a row of the table that a kernel runs.

It copies ``rows`` times ``cols`` elements of ``item`` bytes. For each buffer, it has a first byte, and the distances of
rows and of columns in bytes. Every ``BoxCopy`` equals one or a few of these copies. An engine's process imports this
module, which needs numpy only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import NamedTuple

import numpy as np

from mcore_bridge.weights.plan.boxes import BoxCopy

WIDEST = 16  # bytes that a thread of a GPU copies at once
Table = np.ndarray[tuple[int, int], np.dtype[np.int64]]


class ByteCopy(NamedTuple):
    """A copy from buffer ``source`` to buffer ``target``. Starts, items and distances are bytes."""

    source: int
    source_start: int
    target: int
    target_start: int
    rows: int
    cols: int
    item: int
    source_row: int
    source_col: int
    target_row: int
    target_col: int

    @classmethod
    def of(cls, box: BoxCopy, item: int, *, source: int = 0, target: int = 0, start: int = 0) -> Iterator[ByteCopy]:
        """The copies of a box of elements of ``item`` bytes: one if it has at most two dims, else several.

        Args:
            source, target: the numbers of the two buffers.
            start: the byte of the source from which the box counts.
        """
        dims = [(size, near * item, far * item) for size, near, far in box.dims]
        if len(dims) < 2:
            run = bool(dims) and dims[0][1:] == (item, item)
            dims = [(1, 0, 0), *dims] if run else [*(dims or [(1, 0, 0)]), (1, item, item)]
        *outer, rows, cols = dims
        start, target_start = start + box.source * item, box.target * item
        for index in product(*(range(size) for size, _, _ in outer)):
            yield cls(
                *(source, start + sum(i * near for i, (_, near, _) in zip(index, outer, strict=True))),
                *(target, target_start + sum(i * far for i, (_, _, far) in zip(index, outer, strict=True))),
                *(rows[0], cols[0], item, rows[1], cols[1], rows[2], cols[2]),
            )

    def then(self, box: BoxCopy) -> Iterator[ByteCopy]:
        """The composition: this copy, followed by ``box``, which reads what this copy writes.

        Raises:
            ValueError: when the result is not a few boxes, or this function cannot decide.
        """
        item = self.item
        near, far = (self.source_row, self.source_col), (self.target_row, self.target_col)
        if any(number % item for number in (*near, *far, self.target_start)):
            raise ValueError("bytes that are no whole elements")
        strides = ([distance // item for distance in distances] for distances in (near, far))
        own = BoxCopy.of(0, (self.rows, self.cols), next(strides), self.target_start // item, next(strides))
        both = box.after(own)
        return ByteCopy.of(both, item, source=self.source, start=self.source_start) if both else iter(())

    def num_bytes(self) -> int:
        """Bytes that are copied."""
        return self.rows * self.cols * self.item

    def is_dense(self) -> bool:
        """Whether all elements are contiguous in both buffers, in the same order."""
        row = self.cols * self.item
        in_rows = self.rows == 1 or (self.source_row, self.target_row) == (row, row)
        return in_rows and (self.source_col, self.target_col) == (self.item, self.item)


def stacked(byte_copies: Iterable[ByteCopy]) -> list[ByteCopy]:
    """Join copies of equal rows at equal distances into one copy of many rows."""
    joined: list[ByteCopy] = []
    for byte_copy in byte_copies:
        longer = _with_row(joined[-1], byte_copy) if joined else None
        joined[-1 if longer else len(joined) :] = [longer or byte_copy]
    return joined


def _with_row(joined: ByteCopy, byte_copy: ByteCopy) -> ByteCopy | None:
    """Add the single row of ``byte_copy`` below the rows of ``joined``; None if it is not the next row."""
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
