"""The order in which ranks send, and the sizes of messages: all ranks at once, or stages or experts one after the
other.

A rank sends in the order of the entries. A *period* is a range of entries, of one stage or of all stages. If a stage
has more bytes in a period than other stages, it sends the rest alone, in a separate *phase*. Messages are as large as
memory allows, and smaller while a tensor of a GB is incomplete.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from mcore_bridge.rules.names import expert_of
from mcore_bridge.weights.plan.export_plan import MESSAGES_IN_FLIGHT
from mcore_bridge.weights.plan.payload import Payload
from mcore_bridge.weights.plan.stream import SendRange

MANY = 128
"""With more ranks, only the schedule with the least memory is planned: if all sent at once, it would not fit."""
MIN_WINDOW = 4096
"""Lower limit on the bytes that a rank sends with a message."""
RangesByRank = Mapping[int, Sequence[SendRange]]
"""The ranges that some of the ranks send, by rank."""


class Schedule(NamedTuple):
    """How periods are cut: all stages together, or one stage after the other, each cut at these ``borders``."""

    together: bool
    borders: Sequence[int] = ()


def candidate_schedules(
    payload: Payload, keys: Sequence[object], stages: Sequence[int], large: int, room: int
) -> Iterator[Schedule]:
    """Yield schedules, from the fastest to the one that takes least memory.

    Each rank that sends keeps outputs open at the receivers. So stages may send one after the other. If one tensor ends
    and the next begins in one message, both are open. So the last schedule gives each large entry separate messages. If
    experts lie on many ranks, a few are sent at a time, which take at most ``room`` bytes.

    Args:
        keys: the key of each entry; outputs of entries with one key are yielded together.
        stages: the pipeline stage of each rank.
        large: bytes from which on an entry is large.
        room: bytes of outputs that may be open at once.
    """
    if len(stages) <= MANY:
        yield Schedule(together=True)
        if len(set(stages)) > 1:
            yield Schedule(together=False)
    sizes = [payload.size_of(destinations) for destinations in payload.destinations]
    alone = {border for number, size in enumerate(sizes) if size >= large for border in (number, number + 1)}
    yield Schedule(together=False, borders=sorted(alone.union(_shifts(payload, keys, sizes, room))))


def _shifts(payload: Payload, keys: Sequence[object], sizes: Sequence[int], room: int) -> Iterator[int]:
    """Yield borders between experts that are yielded one by one, so that all holders send equally many in a period."""
    entries_of_key = Counter(keys)

    def kind(number: int) -> tuple[str, int]:
        name = payload.entries[number].held.name
        is_alone = expert_of(name) is not None and entries_of_key[keys[number]] == 1
        return (name.partition(".experts.")[0], sizes[number]) if is_alone else ("", 0)

    for (layer, size), run in groupby(range(len(payload.entries)), key=kind):
        numbers = [*run]
        num_holders = len({min(map(min, payload.entries[number].holders.values())) for number in numbers})
        count = max(room // max(size, 1), 1)
        if layer and count < 2 * num_holders:  # else each holder may have two experts open
            count = -(-num_holders // -(-num_holders // count)) if count < num_holders else num_holders
            yield from (*range(numbers[0], numbers[-1] + 1, count), numbers[-1] + 1)


def periods_of(schedule: Schedule, ranges: Sequence[Sequence[SendRange]], stages: Sequence[int]) -> list[RangesByRank]:
    """The ranges that each rank sends in each period.

    Args:
        ranges: the stream of each rank.
        stages: the pipeline stage of each rank.
    """
    if schedule.together:
        return [dict(enumerate(ranges))]
    periods: dict[tuple[int, int], dict[int, list[SendRange]]] = {}
    for rank, (stage, own) in enumerate(zip(stages, ranges, strict=True)):
        for part in own:
            period = stage, bisect_right(schedule.borders, part.entry)
            periods.setdefault(period, {}).setdefault(rank, []).append(part)
    return [periods[period] for period in sorted(periods)]


def window_of(message_bytes: int, num_senders: int) -> int:
    """Bytes of the window of each sender in a message."""
    return max(message_bytes // num_senders, MIN_WINDOW)


def bytes_of(ranges: Sequence[SendRange], row_bytes: Sequence[int]) -> int:
    """Bytes of send ranges, given the bytes of a row of each entry."""
    return sum(part.rows * row_bytes[part.entry] for part in ranges)


def phases_of(
    period: RangesByRank, row_bytes: Sequence[int], stages: Sequence[int], message_bytes: int
) -> Iterator[RangesByRank]:
    """Yield what ranks send together in a period. A stage with more bytes sends the rest alone, before or after.

    So no window travels half empty. If the first and the last stage have an additional large tensor, which stays open
    for long, no other large tensor is open at that time.
    """
    rest = dict(period)
    totals = {rank: bytes_of(ranges, row_bytes) for rank, ranges in period.items()}
    least, ends = min(totals.values()), list[RangesByRank]()
    own_stages = sorted({stages[rank] for rank in period})
    for place, stage in enumerate(own_stages if len(own_stages) > 1 else ()):
        senders = [rank for rank in period if stages[rank] == stage]
        window = window_of(message_bytes, len(senders))
        if max(totals[rank] for rank in senders) - least < window // 4:
            continue
        begins = 2 * place < len(own_stages)
        alone: dict[int, Sequence[SendRange]] = {}
        for rank in senders:
            halves = split(rest[rank], row_bytes, totals[rank] - least if begins else least)
            alone[rank], rest[rank] = halves if begins else halves[::-1]
        if begins:
            yield alone
        else:
            ends.append(alone)
    yield rest
    yield from ends


def split(
    ranges: Sequence[SendRange], row_bytes: Sequence[int], num_bytes: int
) -> tuple[Sequence[SendRange], Sequence[SendRange]]:
    """Split what a rank sends into the rows that begin within the first ``num_bytes``, and all others."""
    for number, (entry, shard, first, rows) in enumerate(ranges):
        count = max(-(-num_bytes // row_bytes[entry]), 0)
        if count < rows:
            head, tail = SendRange(entry, shard, first, count), SendRange(entry, shard, first + count, rows - count)
            return (*ranges[:number], *([head] if count else [])), (tail, *ranges[number + 1 :])
        num_bytes -= rows * row_bytes[entry]
    return ranges, ()


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
