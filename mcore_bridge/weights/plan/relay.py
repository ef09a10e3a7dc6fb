"""Plans for siblings: workers of engines with equal targets. The trainer sends to one of them, and they pass it on.

Siblings form a chain. The trainer's ranks send to the first one. Each of them passes the windows of a message on to the
next one, unchanged and together in one window of a later message. So the trainer sends as many bytes as to one worker,
and no worker sends more than it gets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate

from mcore_bridge.weights.plan.export_plan import MESSAGES_IN_FLIGHT, ExportPlan, Message
from mcore_bridge.weights.plan.payload import Payload
from mcore_bridge.weights.plan.stream import HEADER, Streams, WindowSlice

LAG = MESSAGES_IN_FLIGHT
"""How many messages later a sibling gets what a worker gets. A step unpacks one message, and packs the one that is so
much later: those between them are on their way."""


@dataclass(frozen=True, slots=True)
class RelayedMessage(Message):
    """A message in which one rank passes on the windows that it got with an earlier message."""

    source: Message = field(repr=False)
    """The earlier message, as this rank got it."""
    sibling: int
    """The rank."""

    @property
    def pieces(self) -> tuple[WindowSlice, ...]:
        """As ``Message.pieces``. All of them lie in the window of the sibling."""
        starts = (*accumulate(self.source.widths, initial=HEADER - self.source.contents.start),)
        return tuple(
            replace(piece, sender=self.sibling, start=starts[piece.sender] + piece.start)
            for piece in self.source.pieces
        )

    @property
    def contents(self) -> range:
        """As ``Message.contents``: the window of the sibling without its header."""
        start = sum(self.widths[: self.sibling])
        return range(start + HEADER, start + self.widths[self.sibling])

    def passed_on(self, rank: int) -> range:
        """As ``Message.passed_on``."""
        return self.source.contents if rank == self.sibling else range(0)


@dataclass(frozen=True)
class RelayedPlan(ExportPlan):
    """The messages to a receiver that gets everything from its sibling. The runs are those of the first sibling."""

    sibling: int
    """The rank of the sibling."""

    @property
    def fed_by(self) -> int:
        """As ``ExportPlan.fed_by``."""
        return self.sibling

    def sent_by(self, sender: int) -> Streams:
        """As ``ExportPlan.sent_by``."""
        return self.streams if sender == self.sibling else ((),)


def relayed(plan: ExportPlan, sibling: int, receiver: int) -> RelayedPlan:
    """The plan of a receiver to which its sibling passes on what it gets, in as many messages: its last ones are idle.

    Args:
        plan: what the sibling gets.
        sibling, receiver: the rank that passes this on, and the rank that gets it.
    """
    messages = (*_relayed(plan, sibling, receiver),)
    room = max(sum(message.widths) for message in messages)
    streams = tuple(tuple(run._replace(message=run.message + LAG) for run in stream) for stream in plan.streams)
    return RelayedPlan(
        plan.payload, streams, tuple(replace(message, room=room) for message in messages), sibling=sibling
    )


def _relayed(plan: ExportPlan, sibling: int, receiver: int) -> Iterator[Message]:
    idle = idle_plan(plan.payload, len(plan.streams), receiver, len(plan.messages))
    yield from idle.messages[:LAG]
    for message, source in zip(idle.messages[LAG:], plan.messages, strict=False):
        widths = [*message.widths]
        widths[sibling] += len(source.contents)
        yield RelayedMessage(message.number, tuple(widths), 0, source.done, message.streams, source, sibling)


def idle_plan(payload: Payload, num_ranks: int, receiver: int, count: int) -> ExportPlan:
    """The plan of a receiver to which a rank sends nothing but headers, as this rank needs it."""
    widths, streams = tuple(HEADER * (rank != receiver) for rank in range(num_ranks)), ((),) * num_ranks
    messages = tuple(Message(number, widths, sum(widths), (), streams) for number in range(count))
    return ExportPlan(payload, streams, messages)
