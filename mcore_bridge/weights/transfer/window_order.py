"""Where the windows of ranks lie in a message: one behind the other, or column by column.

One collective among all ranks carries windows that are all as wide. Of others, which come where stages take turns to
send, NCCL makes a broadcast for each rank, and each takes time for every rank. So among many ranks they travel in two
steps: within columns, the ranks that have the same place in each stage, and then, column by column, within stages.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

FLAT = 16
"""Ranks up to which all windows travel in one step."""


class Row(NamedTuple):
    """Neighbouring ranks whose windows begin at equal distances."""

    first: int
    length: int
    distance: int


class Lineup(NamedTuple):
    """The windows of a message."""

    starts: tuple[int, ...]
    """Byte at which the window of each rank begins."""
    columns: tuple[int, ...]
    """Bytes of each column; none where windows lie one behind the other."""
    rows: tuple[Row, ...]
    """All ranks, in order."""


@lru_cache(maxsize=256)
def lineup(widths: tuple[int, ...], num_stages: int) -> Lineup:
    """Line up windows of these ``widths``, by rank: each stage has as many neighbours.

    Args:
        num_stages: 1 where they are to lie one behind the other however wide they are.
    """
    columns: tuple[int, ...] = ()
    if num_stages == 1 or len({*widths}) == 1:
        starts = tuple(accumulate(widths[:-1], initial=0))
    else:
        places = range(len(widths) // num_stages)
        found = [widths[place :: len(places)] for place in places]
        columns = tuple(map(sum, found))
        begins = [
            accumulate(column[:-1], initial=start)
            for column, start in zip(found, accumulate(columns[:-1], initial=0), strict=True)
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
