"""One strided copy of bytes between two buffers, as data.

It copies ``rows`` times ``cols`` elements of ``item`` bytes. In both buffers it begins at some byte, and its rows and
columns have some distance in bytes. Every copy that a layout needs is one of these, or a few.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

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

    def num_bytes(self) -> int:
        """Bytes that are copied."""
        return self.rows * self.cols * self.item

    def is_dense(self) -> bool:
        """Whether all elements are contiguous in both buffers, in the same order."""
        row = self.cols * self.item
        in_rows = self.rows == 1 or (self.source_row, self.target_row) == (row, row)
        return in_rows and (self.source_col, self.target_col) == (self.item, self.item)
