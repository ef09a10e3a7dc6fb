"""Which ranks send at the same time: all ranks, one pipeline stage after the other, or ranks with some experts.

A rank sends in the order of the entries. So a *period* is a range of entries, of one stage or of all stages. Within a
period, a stage with more bytes than the other stages sends the rest in a separate *phase*.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from mcore_bridge.rules.names import expert_of
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
