"""The plan of an export: which bytes travel together, and which HF tensors they become. It is equal on every rank.

A rank sends one stream of bytes: its shards in order, cut at the ends of rows into messages of one or two sizes. All
ranks send one window per message at the same time. So all pipeline stages send at once, and the number of messages
depends on bytes alone. A message may complete an HF tensor. The tensor is then yielded together with all tensors that
an engine fuses with it in one load call. ``gather.py`` and ``all_to_all.py`` make plans.

The memory that the run of a plan takes beside the model follows from the plan, and has limits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, groupby
from operator import attrgetter

import torch

from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.plan.payload import OutputTensor, Payload
from mcore_bridge.weights.plan.stream import HEADER, Streams, WindowSlice, pieces


@dataclass(frozen=True, slots=True)
class Message:
    """The windows that travel at once."""

    number: int
    widths: tuple[int, ...]
    """Bytes of the window of each rank."""
    room: int
    """Bytes of memory for all windows; messages of one size share it."""
    done: tuple[int, ...]
    """The outputs that are complete with this message, by index."""
    streams: Streams = field(repr=False, compare=False)
    """The streams of the plan."""

    @property
    def pieces(self) -> tuple[WindowSlice, ...]:
        """The contents of all windows. They are not cached: all messages together may have many millions of pieces."""
        senders = (sender for sender, width in enumerate(self.widths) if width != HEADER)  # idle windows have no more
        return tuple(piece for sender in senders for piece in self.pieces_of(sender))

    def pieces_of(self, sender: int) -> Iterator[WindowSlice]:
        """What one rank puts into its window, out of its tensors."""
        return pieces(self.streams[sender], sender, self.number)

    @property
    def contents(self) -> range:
        """The bytes of all windows that a receiver passes on, if it has a sibling: up to the last that is not idle."""
        busy = [sender for sender, width in enumerate(self.widths) if width > HEADER]
        return range(sum(self.widths[: max(busy, default=-1) + 1]))

    def passed_on(self, rank: int) -> range:
        """The bytes of the windows of an earlier message that a rank puts into its window."""
        return range(0)


@dataclass(frozen=True)
class ExportPlan:
    """The messages to one receiver, or to all ranks alike, in the order in which they travel."""

    payload: Payload
    streams: Streams
    messages: tuple[Message, ...]

    @cached_property
    def widths(self) -> Counter[tuple[int, ...]]:
        """The number of messages by the bytes of their windows. There are only few combinations."""
        counts: Counter[tuple[int, ...]] = Counter()
        for widths, messages in groupby(self.messages, key=attrgetter("widths")):
            counts[widths] += len(tuple(messages))
        return counts

    @cached_property
    def open_bytes_by_message(self) -> tuple[int, ...]:
        """Bytes of the outputs that exist at once, with each message.

        An output exists from the first message that writes to it to the last one, and a little longer at the consumer.
        """
        return tuple(_open_bytes(self))

    def checksum(self) -> int:
        """A hash of the plan, equal in every process."""
        messages = tuple((message.widths, message.room, message.done) for message in self.messages)
        return hash((self.payload.checksum, self.streams, messages))

    def stream_checksum(self, sender: int, receiver: int) -> int:
        """A hash of the bytes that travel from one rank to another, equal in every process."""
        widths = tuple(message.widths[sender] for message in self.messages)
        return hash((sender, receiver, self.payload.checksum, self.sent_by(sender), widths))

    def sent_by(self, sender: int) -> Streams:
        """The runs that one rank sends."""
        return (self.streams[sender],)

    @property
    def fed_by(self) -> int | None:
        """The rank that passes on what it gets, if the receiver gets everything from this rank."""
        return None

    @property
    def open_bytes(self) -> int:
        """The most bytes of outputs that exist at once."""
        return max(self.open_bytes_by_message)

    @cached_property
    def dtypes(self) -> frozenset[torch.dtype]:
        """The dtypes of the outputs."""
        return frozenset(output.dtype for output in self.payload.outputs)

    def tensors(self) -> Iterator[TensorSpec]:
        """The specs of all HF tensors, in the order in which they are yielded."""
        for message in self.messages:
            for output in map(self.payload.outputs.__getitem__, message.done):
                yield from output.specs()


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


def _open_bytes(plan: ExportPlan) -> Iterator[int]:
    """See ``ExportPlan.open_bytes_by_message``."""
    outputs = plan.payload.outputs
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
        kept = _kept_by_consumer(done) if done else kept


def _kept_by_consumer(done: Sequence[OutputTensor]) -> int:
    """Bytes of a message's outputs that the consumer may hold while the next message is unpacked.

    These are the last output and all outputs that share memory with it.
    """
    if done and 2 * done[-1].num_bytes > SLAB:
        return done[-1].num_bytes
    return min(sum(output.num_bytes for output in done if 2 * output.num_bytes <= SLAB), 2 * SLAB)


def _first_messages(plan: ExportPlan) -> dict[int, int]:
    """For each output, the first message that writes to it."""
    first_messages: dict[int, int] = {}
    for stream in plan.streams:
        for entry, shard, first, rows, _, message, times in stream:
            for output, start, end in plan.payload.row_ranges(entry, shard):
                begin = max(start, first)
                if begin < min(end, first + rows * times):
                    number = message + (begin - first) // rows
                    first_messages[output] = min(number, first_messages.get(output, number))
    return first_messages


MESSAGES_IN_FLIGHT = 2
"""Messages that travel at once, each in separate memory."""
LAG = MESSAGES_IN_FLIGHT
"""How many messages later a sibling gets what a worker gets. A step unpacks one message, and packs the one that is so
much later: those between them are on their way."""
MEMORY = 2_000_000_000
"""Bytes that an export takes beside the model by default, unless an HF tensor needs more."""
SLAB = 32 << 20
"""Size limit of an allocation that HF tensors of one shape share if they come with one message."""


def peak_bytes(plan: ExportPlan) -> int:
    """The most bytes that messages and outputs take on the receiver."""
    if len(plan.streams) == 1:
        return plan.open_bytes
    rooms = [message.room for message in plan.messages]
    return max(held + _message_bytes(rooms, number) for number, held in enumerate(plan.open_bytes_by_message))


def _message_bytes(rooms: Sequence[int], number: int) -> int:
    """Bytes of memory for messages while message ``number`` is unpacked.

    This message and the next have memory. If the messages after them have another size, memory for all messages in
    flight is allocated at once, while the messages that are not unpacked still have theirs.
    """
    if number + 1 == len(rooms):
        return sum(rooms[-MESSAGES_IN_FLIGHT:])
    now, following, *_ = rooms[number : number + MESSAGES_IN_FLIGHT]
    if now != following:
        return now + MESSAGES_IN_FLIGHT * following
    further = rooms[min(number + MESSAGES_IN_FLIGHT, len(rooms) - 1)]
    return following + max(now, MESSAGES_IN_FLIGHT * further if further != following else 0)
