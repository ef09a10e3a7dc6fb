"""Which bytes travel together and what they become: data, the same on every rank. ``gather.py`` makes it.

What a rank sends is one stream of bytes: its shards in order, cut into messages of one or two sizes, wherever a row
ends. All ranks send one window per message at the same time, so that all pipeline stages send at once, and the number
of messages depends on bytes alone. An HF tensor is given out with the message that completes it and all that an engine
fuses with it in one load call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from operator import attrgetter

import torch

from mcore_bridge.rules.trace import Shape
from mcore_bridge.weights.plan.budget import SLAB
from mcore_bridge.weights.plan.payload import OutputTensor, Payload
from mcore_bridge.weights.plan.stream import HEADER, Streams, WindowSlice, pieces


@dataclass(frozen=True, slots=True)
class Message:
    """What travels at once: the bytes of each rank's window, those of memory for all windows, which messages of one
    size have alike, and the outputs that are complete with it."""

    number: int
    widths: tuple[int, ...]
    room: int
    done: tuple[int, ...]
    streams: Streams = field(repr=False, compare=False)
    """Those of the plan."""

    @property
    def pieces(self) -> tuple[WindowSlice, ...]:
        """What lies in the windows, found anew each time: all pieces of all messages would be many millions."""
        senders = (sender for sender, width in enumerate(self.widths) if width != HEADER)  # which is all of an idle one
        return tuple(piece for sender in senders for piece in self.pieces_of(sender))

    def pieces_of(self, sender: int) -> Iterator[WindowSlice]:
        """What lies in the window of one rank."""
        return pieces(self.streams[sender], sender, self.number)


@dataclass(frozen=True)
class ExportPlan:
    """What travels to one receiver, or to every rank alike: messages, in the order in which they travel."""

    payload: Payload
    streams: Streams
    messages: tuple[Message, ...]

    @cached_property
    def widths(self) -> Counter[tuple[int, ...]]:
        """By the bytes of each rank's window, the number of messages that have them: few differ."""
        found: Counter[tuple[int, ...]] = Counter()
        for widths, messages in groupby(self.messages, key=attrgetter("widths")):
            found[widths] += len(tuple(messages))
        return found

    @cached_property
    def open_bytes_by_message(self) -> tuple[int, ...]:
        """With each message, the bytes of the outputs that are there at once: from the message that first writes to one
        to its last, and those that a consumer holds a little longer."""
        return tuple(_opened(self))

    def checksum(self) -> int:
        """A number for all of it: the same in every process."""
        messages = tuple((message.widths, message.room, message.done) for message in self.messages)
        return hash((self.payload.checksum, self.streams, messages))

    def lane_checksum(self, sender: int, receiver: int) -> int:
        """The same for what travels from one rank to another."""
        widths = tuple(message.widths[sender] for message in self.messages)
        return hash((sender, receiver, self.payload.checksum, self.streams[sender], widths))

    @property
    def open_bytes(self) -> int:
        """Bytes of the outputs that are there at once at most."""
        return max(self.open_bytes_by_message)

    @cached_property
    def dtypes(self) -> frozenset[torch.dtype]:
        """Those of the outputs."""
        return frozenset(output.dtype for output in self.payload.outputs)

    def tensors(self) -> Iterator[tuple[str, Shape, torch.dtype]]:
        """Name, shape and dtype of every HF tensor, in the order in which they are given out."""
        for message in self.messages:
            for output in map(self.payload.outputs.__getitem__, message.done):
                for name in (output.name, *output.copies):
                    yield name, output.shape, output.dtype


def _opened(plan: ExportPlan) -> Iterator[int]:
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
        kept = _still_there(done) if done else kept


def _still_there(done: Sequence[OutputTensor]) -> int:
    """Bytes of what a message gave out that a consumer holds while the next is unpacked: the last one, and what shares
    memory with it."""
    if done and 2 * done[-1].num_bytes > SLAB:
        return done[-1].num_bytes
    return min(sum(output.num_bytes for output in done if 2 * output.num_bytes <= SLAB), 2 * SLAB)


def _first_messages(plan: ExportPlan) -> dict[int, int]:
    """For each output, the first message that writes to it."""
    found: dict[int, int] = {}
    for stream in plan.streams:
        for entry, shard, first, rows, _, message, times in stream:
            for output, start, end in plan.payload.row_ranges(entry, shard):
                begin = max(start, first)
                if begin < min(end, first + rows * times):
                    number = message + (begin - first) // rows
                    found[output] = min(number, found.get(output, number))
    return found
