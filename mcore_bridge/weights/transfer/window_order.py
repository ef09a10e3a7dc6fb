"""The order of the windows of ranks in a message: one behind the other, or column by column.

If all windows have one width, one collective among all ranks carries them. Widths differ if stages send one after the
other. NCCL then makes a broadcast for each rank, and each broadcast takes time on every rank. So among many ranks such
windows travel in two steps: first within columns (the ranks at one position in each stage), then whole columns within
stages.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

FLAT = 16
"""With this many ranks or fewer, all windows travel in one step."""


class Row(NamedTuple):
    """Consecutive ranks whose windows begin at equal distances."""

    first: int
    length: int
    distance: int


class Lineup(NamedTuple):
    """The windows of a message."""

    starts: tuple[int, ...]
    """The byte at which the window of each rank begins."""
    columns: tuple[int, ...]
    """Bytes of each column, the windows of one rank of each stage; empty if windows lie in the order of ranks."""
    rows: tuple[Row, ...]
    """All ranks, in order."""


@lru_cache(maxsize=256)
def lineup(widths: tuple[int, ...], num_stages: int) -> Lineup:
    """Line up the windows of a message.

    Args:
        widths: bytes of the window of each rank. All stages have equally many ranks, and these are consecutive.
        num_stages: 1 if windows must lie one behind the other, for any widths.
    """
    columns: tuple[int, ...] = ()
    if num_stages == 1 or len({*widths}) == 1:
        starts = tuple(accumulate(widths[:-1], initial=0))
    else:
        stage_size = len(widths) // num_stages
        by_column = [widths[place::stage_size] for place in range(stage_size)]
        columns = tuple(map(sum, by_column))
        begins = [
            accumulate(column[:-1], initial=start)
            for column, start in zip(by_column, accumulate(columns[:-1], initial=0), strict=True)
        ]
        starts = tuple(start for stage in zip(*begins, strict=True) for start in stage)
    return Lineup(starts, columns, tuple(_rows(starts)))


def _rows(starts: tuple[int, ...]) -> list[Row]:
    rows = [Row(0, 1, 0)]
    for rank in range(1, len(starts)):
        distance, last = starts[rank] - starts[rank - 1], rows[-1]
        if distance > 0 and (last.length == 1 or last.distance == distance):
            rows[-1] = Row(last.first, last.length + 1, distance)
        else:
            rows.append(Row(rank, 1, 0))
    return rows
