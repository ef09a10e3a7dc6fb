"""The memory that running a plan takes beside the model, counted from the plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mcore_bridge.weights.cut import Run
from mcore_bridge.weights.entries import Entry
from mcore_bridge.weights.plan import ExportPlan, Output

AHEAD = 2
"""Messages that are on their way at once, each in memory of its own."""
MEMORY = 2_000_000_000
"""Bytes that an export takes beside the model, where nothing else is asked for and no HF tensor is too large."""
SLAB = 32 << 20
"""Bytes up to which HF tensors of one shape that come with one message share an allocation."""


def footprint(plan: ExportPlan) -> int:
    """Bytes on the receiver: windows on their way, and outputs."""
    windows = max(sum(message.widths) for message in plan.messages)
    in_flight = min(AHEAD, len(plan.messages)) * windows if len(plan.streams) > 1 else 0
    return in_flight + open_bytes(plan)


def _still_there(done: Sequence[Output]) -> int:
    """Bytes of what a message gave out that a consumer holds while the next is unpacked: the last one, and what shares
    memory with it."""
    if done and 2 * done[-1].num_bytes > SLAB:
        return done[-1].num_bytes
    return min(sum(output.num_bytes for output in done if 2 * output.num_bytes <= SLAB), 2 * SLAB)


def open_bytes(plan: ExportPlan) -> int:
    """Bytes of the outputs that are there at once at most: from the message that first writes to one to its last, and
    those that a consumer holds a little longer."""
    outputs = plan.goods.outputs
    opened = [0] * len(plan.messages)
    for output, number in _first_messages(plan).items():
        opened[number] += outputs[output].num_bytes
    most = held = kept = 0
    for message in plan.messages:
        held += opened[message.number]
        done = [outputs[output] for output in message.done]
        most = max(most, held + max(kept, *(output.num_bytes for output in done if output.copies), 0))
        held -= sum(output.num_bytes for output in done)
        kept = _still_there(done) if done else kept
    return most


def _first_messages(plan: ExportPlan) -> dict[int, int]:
    """For each output, the first message that writes to it."""
    first: dict[int, int] = {}
    for stream in plan.streams:
        for run in stream:
            for part, number in _written(plan.goods.entries[run.entry], run):
                output = plan.goods.places[run.entry][part][0]
                first[output] = min(number, first.get(output, number))
    return first


def _written(entry: Entry, run: Run) -> Iterator[tuple[int, int]]:
    """The parts that a run writes to, and the first message in which it does; one for each stretch of the layout."""
    if len(entry.hf) == 1:
        yield 0, run.message
        return
    for copy, start in entry.copies_of(run.shard):
        first, size = (start, copy.size) if copy.dim == 0 else (0, entry.sent[0])
        begin, end = max(first, run.first), min(first + size, run.first + run.rows * run.times)
        if begin < end:
            yield copy.part, run.message + (begin - run.first) // run.rows
