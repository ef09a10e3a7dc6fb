"""Streams of bytes, cut into messages. Runs describe them, so that the cost depends on parameters, not on bytes.

Most of a shard travels at the same offset of consecutive windows. So a shard takes three runs at most, however many
messages it needs. The first run fills up the window in which the shard begins, the second fills whole windows, and the
third has the rest.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mcore_bridge.rules.spec import aligned

HEADER = 1024
"""Bytes at the beginning of each window for the state of its sender."""


class SendRange(NamedTuple):
    """Consecutive rows of one shard that a rank sends: ``rows`` rows from row ``first`` on."""

    entry: int
    shard: int
    first: int
    rows: int


@dataclass(frozen=True, slots=True)
class WindowSlice:
    """Rows ``first`` to ``first + count`` of a shard, in its sender's window from byte ``start`` on."""

    entry: int
    shard: int
    first: int
    count: int
    sender: int
    start: int


class WindowRun(NamedTuple):
    """Consecutive slices of one shard: ``rows`` rows in each of ``times`` messages, from ``message`` on."""

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
    """Cut streams into messages: at the end of a row, when the window is full.

    Args:
        streams: the ranges that each rank sends.
        row_bytes: bytes of a row of each entry.
        windows: bytes of each rank's window, its header included. A window is larger if one row takes more.
        first: the number of the first message.
    """
    pairs = zip(streams, windows, strict=True)
    return tuple(tuple(_runs(stream, row_bytes, window, first)) for stream, window in pairs)


def num_messages(streams: Streams) -> int:
    """The number of messages that streams take, at least one."""
    return 1 + max((stream[-1].last() for stream in streams if stream), default=0)


def widths(stream: Sequence[WindowRun], row_bytes: Sequence[int], count: int) -> tuple[int, int]:
    """Bytes of a rank's window: in all of ``count`` messages except the last, and in the last message."""
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
    """Yield the pieces of a stream in the window of message ``number``."""
    for index in range(bisect_left(stream, number, key=WindowRun.last), len(stream)):
        entry, shard, first, count, start, message, _ = stream[index]
        if message > number:
            break
        yield WindowSlice(entry, shard, first + (number - message) * count, count, sender, start)
