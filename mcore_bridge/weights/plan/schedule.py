"""Who sends at the same time: stages take turns, experts go in shifts, and a stage sends alone what it has more.

What a rank sends, it sends in the order of the entries. So a turn is a range of entries, of one stage or of all.
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
"""Ranks from which on only what takes least memory is planned: all of them at once would have too much on its way."""
MIN_WINDOW = 4096
"""Bytes that a rank sends per message at least."""
Parts = Mapping[int, Sequence[SendRange]]
"""What some ranks send, by rank."""


class Schedule(NamedTuple):
    """How turns are taken: all stages together; or one after the other, each between these entries."""

    together: bool
    borders: Sequence[int] = ()


def candidate_schedules(
    goods: Payload, keys: Sequence[object], stages: Sequence[int], large: int, room: int
) -> Iterator[Schedule]:
    """Ways to take turns, from the fastest to that which takes least memory.

    Each rank that sends has tensors in the making: so one stage sends after the other. Where one tensor ends and the
    next begins, both are: so what is made of ``large`` entries, by bytes, has messages of its own, and of experts that
    lie on so many ranks that those of all take more than ``room`` bytes, only as many go at once as take that.

    Args:
        keys: for each entry, what is given out together.
        stages: of each rank.
    """
    if len(stages) <= MANY:
        yield Schedule(together=True)
        if len(set(stages)) > 1:
            yield Schedule(together=False)
    sizes = [goods.size_of(places) for places in goods.places]
    alone = {border for number, size in enumerate(sizes) if size >= large for border in (number, number + 1)}
    yield Schedule(together=False, borders=sorted(alone.union(_shifts(goods, keys, sizes, room))))


def _shifts(goods: Payload, keys: Sequence[object], sizes: Sequence[int], room: int) -> Iterator[int]:
    """Borders between experts that are given out one by one. In a shift each holder sends as many as the others."""
    times = Counter(keys)

    def kind(number: int) -> tuple[str, int]:
        name = goods.entries[number].held.name
        is_alone = expert_of(name) is not None and times[keys[number]] == 1
        return (name.partition(".experts.")[0], sizes[number]) if is_alone else ("", 0)

    for (layer, size), run in groupby(range(len(goods.entries)), key=kind):
        numbers = [*run]
        many = len({min(map(min, goods.entries[number].holders.values())) for number in numbers})
        count = max(room // max(size, 1), 1)
        if layer and count < 2 * many:  # else each holder may have two in the making
            count = -(-many // -(-many // count)) if count < many else many
            yield from (*range(numbers[0], numbers[-1] + 1, count), numbers[-1] + 1)


def turns_of(way: Schedule, parts: Sequence[Sequence[SendRange]], stages: Sequence[int]) -> list[Parts]:
    """What ranks send in each turn.

    Args:
        parts: all that each rank sends.
        stages: of each rank.
    """
    if way.together:
        return [dict(enumerate(parts))]
    found: dict[tuple[int, int], dict[int, list[SendRange]]] = {}
    for rank, (stage, each) in enumerate(zip(stages, parts, strict=True)):
        for part in each:
            turn = stage, bisect_right(way.borders, part.entry)
            found.setdefault(turn, {}).setdefault(rank, []).append(part)
    return [found[turn] for turn in sorted(found)]


def window_of(message_bytes: int, num_senders: int) -> int:
    return max(message_bytes // num_senders, MIN_WINDOW)


def bytes_of(parts: Sequence[SendRange], row_bytes: Sequence[int]) -> int:
    return sum(part.rows * row_bytes[part.entry] for part in parts)


def phases_of(turn: Parts, row_bytes: Sequence[int], stages: Sequence[int], message_bytes: int) -> Iterator[Parts]:
    """The ranks of a turn send at the same time; what a stage has more, it sends alone, before that or after it.

    No window travels half empty then, and where the first and the last stage have a large tensor more, which is in the
    making for long, no other is at that time.
    """
    rest = dict(turn)
    totals = {rank: bytes_of(each, row_bytes) for rank, each in turn.items()}
    least, ends = min(totals.values()), list[Parts]()
    places = sorted({stages[rank] for rank in turn})
    for place, stage in enumerate(places if len(places) > 1 else ()):
        senders = [rank for rank in turn if stages[rank] == stage]
        window = window_of(message_bytes, len(senders))
        if max(totals[rank] for rank in senders) - least < window // 4:
            continue
        begins = 2 * place < len(places)
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
    parts: Sequence[SendRange], row_bytes: Sequence[int], num_bytes: int
) -> tuple[Sequence[SendRange], Sequence[SendRange]]:
    """The rows that begin within the first ``num_bytes``, and all others."""
    for number, (entry, shard, first, rows) in enumerate(parts):
        count = max(-(-num_bytes // row_bytes[entry]), 0)
        if count < rows:
            head, tail = SendRange(entry, shard, first, count), SendRange(entry, shard, first + count, rows - count)
            return (*parts[:number], *([head] if count else [])), (tail, *parts[number + 1 :])
        num_bytes -= rows * row_bytes[entry]
    return parts, ()
