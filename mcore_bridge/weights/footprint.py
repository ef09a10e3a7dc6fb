"""The memory that running a plan takes beside the model, counted from the plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mcore_bridge.weights.plan import ExportPlan, Output

AHEAD = 2
"""Messages that are on their way at once, each in memory of its own."""
MEMORY = 2_000_000_000
"""Bytes that an export takes beside the model, where nothing else is asked for and no HF tensor is too large."""
SLAB = 32 << 20
"""Bytes up to which HF tensors of one shape that come with one message share an allocation."""


def footprint(plan: ExportPlan) -> int:
    """Bytes on the receiver: memory for messages, and outputs."""
    if len(plan.streams) == 1:
        return plan.open_bytes
    rooms = [message.room for message in plan.messages]
    return max(held + _for_messages(rooms, number) for number, held in enumerate(plan.opened))


def _for_messages(rooms: Sequence[int], number: int) -> int:
    """Bytes of memory for messages while one is unpacked: of itself, of the next, and what is made for further ones.

    Where their size changes, there is as much as for all that will be on their way, beside what has not arrived yet.
    """
    if number + 1 == len(rooms):
        return sum(rooms[-AHEAD:])
    now, following, *_ = rooms[number : number + AHEAD]
    if now != following:
        return now + AHEAD * following
    further = rooms[min(number + AHEAD, len(rooms) - 1)]
    return following + max(now, AHEAD * further if further != following else 0)


def _still_there(done: Sequence[Output]) -> int:
    """Bytes of what a message gave out that a consumer holds while the next is unpacked: the last one, and what shares
    memory with it."""
    if done and 2 * done[-1].num_bytes > SLAB:
        return done[-1].num_bytes
    return min(sum(output.num_bytes for output in done if 2 * output.num_bytes <= SLAB), 2 * SLAB)


def opened(plan: ExportPlan) -> Iterator[int]:
    """With each message, the bytes of the outputs that are there at once: from the message that first writes to one to
    its last, and those that a consumer holds a little longer."""
    outputs = plan.goods.outputs
    sizes = [output.num_bytes for output in outputs]
    new = [0] * len(plan.messages)
    for output, number in _first_messages(plan).items():
        new[number] += sizes[output]
    held = kept = 0
    for message in plan.messages:
        held += new[message.number]
        done = [outputs[output] for output in message.done]
        yield held + max(kept, *(output.num_bytes for output in done if output.copies), 0)
        held -= sum(map(sizes.__getitem__, message.done))
        kept = _still_there(done) if done else kept


def _first_messages(plan: ExportPlan) -> dict[int, int]:
    """For each output, the first message that writes to it."""
    found: dict[int, int] = {}
    for stream in plan.streams:
        for entry, shard, first, rows, _, message, times in stream:
            for output, start, end in plan.goods.stretches(entry, shard):
                begin = max(start, first)
                if begin < min(end, first + rows * times):
                    number = message + (begin - first) // rows
                    found[output] = min(number, found.get(output, number))
    return found
