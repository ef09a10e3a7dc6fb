"""How large messages are: as large as memory allows, so smaller while a tensor of a GB is in the making."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from mcore_bridge.weights.plan.budget import MESSAGES_IN_FLIGHT
from mcore_bridge.weights.plan.schedule import Parts, bytes_of, split, window_of

FEW = 4
"""Large tensors of a model, at most: an embedding, an output layer. Where there are more, all messages are alike."""


class Span(NamedTuple):
    """Bytes of what each rank sends that go in small messages."""

    start: int
    end: int
    starts: dict[int, int]
    """By rank, where its own large entry starts a little later."""


class Sizes(NamedTuple):
    """Bytes that a rank receives with a message: as usual, and beside the large ones among the entries."""

    usual: int
    beside: int
    large: frozenset[int] = frozenset()


def large_entries(keys: Sequence[object], sizes: Mapping[object, int]) -> frozenset[int]:
    """The few entries of which more than half as much is made together as of any.

    Args:
        keys: for each entry, what is given out together.
        sizes: by key, the bytes of that.
    """
    most = max(sizes.values(), default=0)
    found = {key for key, size in sizes.items() if 2 * size > most}
    return frozenset(number for number, key in enumerate(keys) if key in found) if len(found) <= FEW else frozenset()


def sized(phases: Iterable[Parts], row_bytes: Sequence[int], sizes: Sizes) -> Iterator[tuple[int, Parts]]:
    """What ranks send at the same time, phase by phase, cut where the size of messages changes; and that size.

    A large entry begins with a message, so that those before it are complete. What is on its way when the last of it
    arrives is as small still, and so is what follows while a consumer holds the tensor.
    """
    behind = 0  # messages that are to be small still
    for phase in phases:
        small, usual = (window_of(size, len(phase)) for size in (sizes.beside, sizes.usual))
        rest, sent = dict(phase), Counter[int]()
        for span in _spans(
            phase, row_bytes, sizes.large, behind * small, (MESSAGES_IN_FLIGHT + 1) * small, usual, small
        ):
            starts, ends = dict.fromkeys(phase, span.start) | span.starts, dict.fromkeys(phase, span.end)
            for size, until in ((sizes.usual, starts), (sizes.beside, ends)):
                halves = {rank: split(each, row_bytes, until[rank] - sent[rank]) for rank, each in rest.items()}
                head, rest = ({rank: both[half] for rank, both in halves.items()} for half in (0, 1))
                for rank, each in head.items():
                    sent[rank] += bytes_of(each, row_bytes)
                if sending := _some(head):
                    yield size, sending
            behind = MESSAGES_IN_FLIGHT + 1
        if sending := _some(rest):
            behind = 0
            yield sizes.usual, sending


def _some(parts: Parts) -> Parts:
    return {rank: each for rank, each in parts.items() if each}


def _spans(
    parts: Parts, row_bytes: Sequence[int], large: frozenset[int], first: int, behind: int, least: int, near: int
) -> list[Span]:
    """From which byte to which of what each rank sends messages are to be small.

    Args:
        first: bytes at the beginning.
        behind: bytes after what is large.
        least: bytes between two, or they are one.
        near: bytes that a rank may be ahead of others.
    """
    found = [Span(0, first, dict.fromkeys(parts, 0))] if first else []
    for start, end, rank in sorted(_of_each(parts, row_bytes, large)):
        span = Span(start, end + behind, {})
        if found and start < found[-1].end + least:
            last = found.pop()
            span = Span(last.start, max(span.end, last.end), last.starts)
        if start <= span.start + near:
            span.starts.setdefault(rank, start)
        found.append(span)
    return found


def _of_each(parts: Parts, row_bytes: Sequence[int], large: frozenset[int]) -> Iterator[tuple[int, int, int]]:
    sent: Counter[int] = Counter()
    for rank, each in parts.items():
        for part in each if large else ():
            start = sent[rank]
            sent[rank] += part.rows * row_bytes[part.entry]
            if part.entry in large:
                yield start, sent[rank], rank
