"""Streams of bytes, cut into messages: as runs, so that the cost depends on parameters and not on their bytes.

Most of a shard travels in the same place of windows that follow one another. So a shard is three runs at most, however
many messages it takes: what fills up the window in which it begins, whole windows, and the rest.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mcore_bridge.weights.plan.alignment import aligned

HEADER = 1024
"""Bytes at the beginning of each window, in which its sender says how it is."""


class SendRange(NamedTuple):
    """What a rank sends at a stretch: of a shard of an entry, so many rows from the first on."""

    entry: int
    shard: int
    first: int
    rows: int


@dataclass(frozen=True, slots=True)
class WindowSlice:
    """Rows ``first`` to ``first + count`` of a shard of an entry, in its sender's window from byte ``start`` on."""

    entry: int
    shard: int
    first: int
    count: int
    sender: int
    start: int


class WindowRun(NamedTuple):
    """Pieces of one shard, one behind the other: ``rows`` rows in each of ``times`` messages from ``message`` on."""

    entry: int
    shard: int
    first: int
    rows: int
    start: int
    message: int
    times: int

    def last(self) -> int:
        """The number of its last message."""
        return self.message + self.times - 1


Streams = tuple[tuple[WindowRun, ...], ...]
"""The runs of each rank, in the order in which they travel."""


def cut(
    streams: Sequence[Sequence[SendRange]], row_bytes: Sequence[int], windows: Sequence[int], *, first: int = 0
) -> Streams:
    """Streams, cut into messages: at the end of a row, where the window is full.

    Args:
        streams: of each rank.
        row_bytes: of each entry.
        windows: bytes of each rank's window, its header included; more where one row takes more.
        first: the number of the first message.
    """
    pairs = zip(streams, windows, strict=True)
    return tuple(tuple(_runs(stream, row_bytes, window, first)) for stream, window in pairs)


def num_messages(streams: Streams) -> int:
    """Messages that streams take, one at least."""
    return 1 + max((stream[-1].last() for stream in streams if stream), default=0)


def widths(stream: Sequence[WindowRun], row_bytes: Sequence[int], count: int) -> tuple[int, int]:
    """Bytes that a rank's window takes: in any but the last of ``count`` messages, and in the last."""
    width, last_width = HEADER, HEADER
    for run in stream:
        end = aligned(run.start + run.rows * row_bytes[run.entry])
        if run.message < count - 1:
            width = max(width, end)
        if run.last() == count - 1:
            last_width = max(last_width, end)
    return width, last_width


def _runs(stream: Sequence[SendRange], row_bytes: Sequence[int], window: int, message: int) -> Iterator[WindowRun]:
    filled = HEADER
    for entry, shard, first, left in stream:
        size = row_bytes[entry]
        while left:
            count = min(left, (window - filled) // size)
            if count <= 0 and filled > HEADER:
                message, filled = message + 1, HEADER
                continue
            count = max(count, 1)
            times = left // count if filled == HEADER else 1
            yield WindowRun(entry, shard, first, count, filled, message, times)
            message += times - 1
            filled = aligned(filled + count * size)
            first, left = first + count * times, left - count * times


def pieces(stream: Sequence[WindowRun], sender: int, number: int) -> Iterator[WindowSlice]:
    """The pieces of one message in a stream."""
    for index in range(bisect_left(stream, number, key=WindowRun.last), len(stream)):
        entry, shard, first, count, start, message, _ = stream[index]
        if message > number:
            break
        yield WindowSlice(entry, shard, first + (number - message) * count, count, sender, start)
