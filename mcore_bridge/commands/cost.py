"""What an export costs a rank, from its plan: bytes, messages, memory as ``weights/exchange.py`` takes it, seconds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mcore_bridge.commands.options import BANDWIDTH
from mcore_bridge.weights.cut import Run
from mcore_bridge.weights.entries import Entry
from mcore_bridge.weights.plan import AHEAD, ExportPlan


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one export, on the rank that has most of it.

    Attributes:
        num_ranks: that export together.
        num_messages: collectives; beside them there are two small all-reduces.
        sent: bytes of a rank's own windows. They are as wide as the fullest one, so that all ranks send the same.
        weights: bytes of weights in ``sent``, on the rank with most of them.
        received: bytes of the windows of the others.
        memory: bytes beside the model, while a consumer holds no tensor that it was given before.
        seconds: that receiving takes at a bandwidth, and nothing else.
    """

    num_ranks: int
    num_messages: int
    sent: int
    weights: int
    received: int
    memory: int
    seconds: float


def cost_of(plan: ExportPlan, *, bandwidth: float = BANDWIDTH) -> Cost:
    """Count.

    Args:
        plan: of an export.
        bandwidth: that a rank receives with, in GB/s.
    """
    num_ranks = len(plan.streams)
    sent = sum(message.num_bytes for message in plan.messages) if num_ranks > 1 else 0
    row_bytes = [entry.held.row_bytes for entry in plan.entries]
    weights = max(sum(run.rows * run.times * row_bytes[run.entry] for run in stream) for stream in plan.streams)
    received = sent * (num_ranks - 1)
    windows = [message.num_bytes for message in plan.messages][:AHEAD] if num_ranks > 1 else []
    in_flight = len(windows) * num_ranks * max(message.num_bytes for message in plan.messages)
    return Cost(
        num_ranks=num_ranks,
        num_messages=len(plan.messages) if num_ranks > 1 else 0,
        sent=sent,
        weights=weights if num_ranks > 1 else 0,
        received=received,
        memory=in_flight + _open(plan),
        seconds=received / bandwidth / 1e9,
    )


def _open(plan: ExportPlan) -> int:
    """Bytes of the outputs that are there at once at most: from the message that first writes to one to its last."""
    opened = [0] * len(plan.messages)
    for output, number in _first_messages(plan).items():
        opened[number] += plan.outputs[output].num_bytes
    most = held = 0
    for message in plan.messages:
        held += opened[message.number]
        done = [plan.outputs[output] for output in message.done]
        most = max(most, held + max((output.num_bytes for output in done if output.copies), default=0))
        held -= sum(output.num_bytes for output in done)
    return most


def _first_messages(plan: ExportPlan) -> dict[int, int]:
    """For each output, the first message that writes to it."""
    first: dict[int, int] = {}
    for stream in plan.streams:
        for run in stream:
            for part, number in _written(plan.entries[run.entry], run):
                output = plan.places[run.entry][part][0]
                first[output] = min(number, first.get(output, number))
    return first


def _written(entry: Entry, run: Run) -> Iterator[tuple[int, int]]:
    """The parts that a run writes to, and the first message in which it does; one for each stretch of the layout."""
    if len(entry.hf) == 1:
        yield 0, run.message
        return
    for copy in entry.trace.to_hf:
        if copy.shard != run.shard:
            continue
        start, size = (copy.shard_start, copy.size) if copy.dim == 0 else (0, entry.held.shape[0])
        begin, end = max(start, run.first), min(start + size, run.first + run.rows * run.times)
        if begin < end:
            yield copy.part, run.message + (begin - run.first) // run.rows
