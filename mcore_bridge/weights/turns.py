"""Who sends at the same time: pipeline stages take turns, and a stage sends alone what it has more than others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from mcore_bridge.weights.cut import Part
from mcore_bridge.weights.plan import Goods

MIN_WINDOW = 4096
"""Bytes that a rank sends per message at least."""


class Turn(NamedTuple):
    """Pipeline stages that send at the same time, and which of the entries."""

    stages: Sequence[int]
    entries: range


def turns_of(goods: Goods, stages: Sequence[int], large: int) -> Iterator[Sequence[Turn]]:
    """Ways to take turns, from the fastest to that which takes least memory.

    Each stage that sends has tensors in the making: so one sends after the other. Where one tensor ends and the next
    begins, both are: so what is made of ``large`` entries, by bytes, has messages of its own.
    """
    everything = range(len(goods.entries))
    yield [Turn(stages, everything)]
    if len(stages) > 1:
        yield [Turn([stage], everything) for stage in stages]
    alone = [number for number, places in enumerate(goods.places) if goods.size_of(places) >= large]
    borders = sorted({0, *alone, *(number + 1 for number in alone), len(goods.entries)})
    yield [Turn([stage], range(*each)) for stage in stages for each in pairwise(borders)]


def window_of(message_bytes: int, num_senders: int) -> int:
    return max(message_bytes // num_senders, MIN_WINDOW)


class Phase(NamedTuple):
    """Messages with which some ranks send: who, the bytes of a window of theirs, and what each rank sends."""

    senders: frozenset[int]
    window: int
    parts: Sequence[Sequence[Part]]


def phases_of(
    turn: Turn, parts: Sequence[Sequence[Part]], row_bytes: Sequence[int], stages: Sequence[int], message_bytes: int
) -> Iterator[Phase]:
    """The ranks of a turn send at the same time; what a stage has more, it sends alone, before that or after it.

    No window travels half empty then, and where the first and the last stage have a large tensor more, which is in the
    making for long, no other is at that time.
    """
    everybody = frozenset(rank for rank, stage in enumerate(stages) if stage in turn.stages)
    rest: list[Sequence[Part]] = [
        tuple(part for part in each if part.entry in turn.entries) if rank in everybody else ()
        for rank, each in enumerate(parts)
    ]
    totals = [sum(part.rows * row_bytes[part.entry] for part in each) for each in rest]
    if not any(totals):
        return
    least, ends = min(totals[rank] for rank in everybody), []
    for place, stage in enumerate(turn.stages if len(turn.stages) > 1 else ()):
        senders = frozenset(rank for rank in everybody if stages[rank] == stage)
        window = window_of(message_bytes, len(senders))
        if max(totals[rank] for rank in senders) - least < window // 4:
            continue
        begins = 2 * place < len(turn.stages)
        alone: list[Sequence[Part]] = [()] * len(stages)
        for rank in senders:
            split = _split(rest[rank], row_bytes, totals[rank] - least if begins else least)
            alone[rank], rest[rank] = split if begins else split[::-1]
        if begins:
            yield Phase(senders, window, alone)
        else:
            ends.append(Phase(senders, window, alone))
    yield Phase(everybody, window_of(message_bytes, len(everybody)), rest)
    yield from ends


def _split(parts: Sequence[Part], row_bytes: Sequence[int], num_bytes: int) -> tuple[Sequence[Part], Sequence[Part]]:
    """The rows that begin within the first ``num_bytes``, and all others."""
    for number, (entry, shard, first, rows) in enumerate(parts):
        count = max(-(-num_bytes // row_bytes[entry]), 0)
        if count < rows:
            head, tail = Part(entry, shard, first, count), Part(entry, shard, first + count, rows - count)
            return (*parts[:number], *([head] if count else [])), (tail, *parts[number + 1 :])
        num_bytes -= rows * row_bytes[entry]
    return parts, ()
