"""The sizes of messages: as large as memory allows, and smaller while a tensor of a GB is incomplete."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from mcore_bridge.weights.plan.budget import MESSAGES_IN_FLIGHT
from mcore_bridge.weights.plan.schedule import RangesByRank, bytes_of, split, window_of

FEW = 4
"""Upper limit on large tensors, such as the embedding and the output layer. With more, all messages have one size."""


class Span(NamedTuple):
    """The range of bytes of each rank's stream in which messages are small."""

    start: int
    end: int
    starts: dict[int, int]
    """The start on ranks whose large entry begins a little later."""


class Sizes(NamedTuple):
    """Bytes that a rank receives with a message."""

    usual: int
    beside: int
    """The bytes while a large entry is incomplete."""
    large: frozenset[int] = frozenset()
    """The large entries."""


def large_entries(keys: Sequence[object], sizes: Mapping[object, int]) -> frozenset[int]:
    """The entries of the few keys that have more than half the bytes of the largest key.

    Args:
        keys: the key of each entry.
        sizes: bytes of the outputs of each key.
    """
    most = max(sizes.values(), default=0)
    large = {key for key, size in sizes.items() if 2 * size > most}
    return frozenset(number for number, key in enumerate(keys) if key in large) if len(large) <= FEW else frozenset()


def sized(phases: Iterable[RangesByRank], row_bytes: Sequence[int], sizes: Sizes) -> Iterator[tuple[int, RangesByRank]]:
    """Yield the ranges that ranks send together with one size of messages, and this size.

    A large entry begins a new message, so that the entries before it are complete. Messages in flight when its last row
    arrives are small, too. Messages stay small while a consumer holds the tensor.
    """
    behind = 0  # messages that must still be small
    for phase in phases:
        small, usual = (window_of(size, len(phase)) for size in (sizes.beside, sizes.usual))
        rest, sent = dict(phase), Counter[int]()
        for span in _spans(
            phase, row_bytes, sizes.large, behind * small, (MESSAGES_IN_FLIGHT + 1) * small, usual, small
        ):
            starts, ends = dict.fromkeys(phase, span.start) | span.starts, dict.fromkeys(phase, span.end)
            for size, until in ((sizes.usual, starts), (sizes.beside, ends)):
                halves = {rank: split(ranges, row_bytes, until[rank] - sent[rank]) for rank, ranges in rest.items()}
                head, rest = ({rank: both[half] for rank, both in halves.items()} for half in (0, 1))
                for rank, ranges in head.items():
                    sent[rank] += bytes_of(ranges, row_bytes)
                if sending := _some(head):
                    yield size, sending
            behind = MESSAGES_IN_FLIGHT + 1
        if sending := _some(rest):
            behind = 0
            yield sizes.usual, sending


def _some(phase: RangesByRank) -> RangesByRank:
    return {rank: ranges for rank, ranges in phase.items() if ranges}


def _spans(
    phase: RangesByRank, row_bytes: Sequence[int], large: frozenset[int], first: int, behind: int, least: int, near: int
) -> list[Span]:
    """The spans of small messages in a phase.

    Args:
        first: bytes of small messages at the beginning.
        behind: bytes of small messages after a large entry.
        least: bytes between two spans; nearer spans are joined.
        near: bytes that a rank may be ahead of other ranks.
    """
    spans = [Span(0, first, dict.fromkeys(phase, 0))] if first else []
    for start, end, rank in sorted(_large_ranges(phase, row_bytes, large)):
        span = Span(start, end + behind, {})
        if spans and start < spans[-1].end + least:
            last = spans.pop()
            span = Span(last.start, max(span.end, last.end), last.starts)
        if start <= span.start + near:
            span.starts.setdefault(rank, start)
        spans.append(span)
    return spans


def _large_ranges(
    phase: RangesByRank, row_bytes: Sequence[int], large: frozenset[int]
) -> Iterator[tuple[int, int, int]]:
    """Yield first byte, last byte and rank for each large entry in the stream of a rank."""
    sent: Counter[int] = Counter()
    for rank, ranges in phase.items():
        for part in ranges if large else ():
            start = sent[rank]
            sent[rank] += part.rows * row_bytes[part.entry]
            if part.entry in large:
                yield start, sent[rank], rank
