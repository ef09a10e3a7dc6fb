"""Which bytes travel together and what they become: data, the same on every rank. ``planning.py`` makes it.

What a rank sends is one stream of bytes: its shards in order, cut into messages of one or two sizes, wherever a row
ends. All ranks send one window per message at the same time, so that all pipeline stages send at once, and the number
of messages depends on bytes alone. An HF tensor is given out with the message that completes it and all that an engine
fuses with it in one load call.
"""

from __future__ import annotations

import math
import re
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import torch

from mcore_bridge.weights.cut import HEADER, Piece, Streams, pieces
from mcore_bridge.weights.entries import Entry
from mcore_bridge.weights.footprint import opened
from mcore_bridge.weights.mapping import unstacked
from mcore_bridge.weights.names import expert_of
from mcore_bridge.weights.trace import Shape

_FUSED = re.compile(r"^(.*\.self_attention)\.(?!linear_proj\.)")


@dataclass(frozen=True, slots=True)
class Output:
    """An HF tensor: its name, shape and dtype, and further names under which it is written."""

    name: str
    shape: Shape
    dtype: torch.dtype
    copies: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes that the tensor takes."""
        return math.prod(self.shape) * self.dtype.itemsize


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
    def pieces(self) -> tuple[Piece, ...]:
        """What lies in the windows, found anew each time: all pieces of all messages would be many millions."""
        senders = (sender for sender, width in enumerate(self.widths) if width != HEADER)  # which is all of an idle one
        return tuple(piece for sender in senders for piece in self.pieces_of(sender))

    def pieces_of(self, sender: int) -> Iterator[Piece]:
        """What lies in the window of one rank."""
        return pieces(self.streams[sender], sender, self.number)


class Stretch(NamedTuple):
    """Rows of what travels of a shard that become a part of one output."""

    output: int
    first: int
    end: int


@dataclass(frozen=True)
class Goods:
    """What a receiver gets, in order; entries and outputs go by their places."""

    entries: tuple[Entry, ...]
    outputs: tuple[Output, ...]
    places: tuple[tuple[tuple[int, int], ...], ...]
    """For each part of each entry, its output and the byte at which it begins there."""
    _stretches: dict[tuple[int, int], tuple[Stretch, ...]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, entries: Sequence[Entry]) -> Goods:
        """What becomes of ``entries``. Several may make up one output."""
        outputs: list[Output] = []
        numbers: dict[str, int] = {}
        places = []
        for entry in entries:
            found = []
            for index, (hf, shape) in enumerate(zip(entry.hf, entry.trace.part_shapes, strict=True)):
                name, number = unstacked(hf)
                if name not in numbers:
                    numbers[name] = len(outputs)
                    whole = shape if number is None else (entry.stack, *shape)
                    outputs.append(Output(name, whole, entry.held.dtype, entry.copies if index == 0 else ()))
                found.append((numbers[name], (number or 0) * math.prod(shape) * entry.held.dtype.itemsize))
            places.append(tuple(found))
        return cls(tuple(entries), tuple(outputs), tuple(places))

    def stretches(self, number: int, shard: int) -> tuple[Stretch, ...]:
        """What becomes of a shard of an entry; found once, as many ranks send a part each, and plans are tried."""
        if (number, shard) not in self._stretches:
            entry = self.entries[number]
            outputs = [output for output, _ in self.places[number]]
            if len(outputs) == 1:
                found = [Stretch(outputs[0], 0, entry.sent[0])]
            else:
                copies = entry.copies_of(shard)
                rows = [(c.part, *((at, c.size) if c.dim == 0 else (0, entry.sent[0]))) for c, at in copies]
                found = [Stretch(outputs[part], first, first + size) for part, first, size in rows]
            self._stretches[number, shard] = tuple(found)
        return self._stretches[number, shard]

    @cached_property
    def number(self) -> int:
        """A number for what is got and in which order: the same in every process, as hashes of numbers are."""
        traces = {id(entry.trace): entry.trace for entry in self.entries}  # which many entries share
        copies = {key: _number(repr(trace.to_hf)) for key, trace in traces.items()}
        said = []
        for entry in self.entries:
            names = _number(f"{entry.held.mcore} {entry.hf} {entry.held.dtype}")
            said.append((names, entry.sent, entry.starts or (), copies[id(entry.trace)]))
        return hash(tuple(said))

    def size_of(self, places: Iterable[tuple[int, int]]) -> int:
        """Bytes of the outputs at ``places``."""
        return sum(self.outputs[output].num_bytes for output, _ in places)

    def sizes_together(self, keys: Sequence[object]) -> dict[object, int]:
        """By key, the bytes of the outputs that are given out together."""
        found: dict[object, dict[int, int]] = {}
        for key, places in zip(keys, self.places, strict=True):
            found.setdefault(key, {}).update(places)
        return {key: self.size_of(places.items()) for key, places in found.items()}

    def together(self, bucket_bytes: int) -> tuple[object, ...]:
        """For each entry a key: what becomes of those of one key is given out together.

        An engine fuses, within one load call, projections of an attention; the parts of one parameter, such as gate and
        up; and the experts of a layer, which go together unless they alone take more than ``bucket_bytes``.
        """
        layers: dict[str, dict[int, int]] = {}
        for entry, found in zip(self.entries, self.places, strict=True):
            if expert_of(entry.held.mcore) is not None:
                sizes = layers.setdefault(_experts(entry), {})
                sizes.update((output, self.outputs[output].num_bytes) for output, _ in found)
        kept = {layer for layer, sizes in layers.items() if sum(sizes.values()) <= bucket_bytes}
        return tuple(self._key(*each, kept) for each in zip(self.entries, self.places, strict=True))

    @staticmethod
    def _key(entry: Entry, found: Sequence[tuple[int, int]], kept: Collection[str]) -> object:
        if expert_of(entry.held.mcore) is not None:
            return _experts(entry) if _experts(entry) in kept else found[0][0]
        fused = _FUSED.match(entry.held.mcore)
        return fused[1] if fused else entry.held.mcore


@dataclass(frozen=True)
class ExportPlan:
    """What travels to one receiver, or to every rank alike: messages, in the order in which they travel."""

    goods: Goods
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
    def opened(self) -> tuple[int, ...]:
        """See ``footprint.opened``."""
        return tuple(opened(self))

    def number(self) -> int:
        """A number for all of it: the same in every process."""
        messages = tuple((message.widths, message.room, message.done) for message in self.messages)
        return hash((self.goods.number, self.streams, messages))

    def number_of_lane(self, sender: int, receiver: int) -> int:
        """The same for what travels from one rank to another."""
        widths = tuple(message.widths[sender] for message in self.messages)
        return hash((sender, receiver, self.goods.number, self.streams[sender], widths))

    @property
    def open_bytes(self) -> int:
        """Bytes of the outputs that are there at once at most."""
        return max(self.opened)

    @cached_property
    def dtypes(self) -> frozenset[torch.dtype]:
        """Those of the outputs."""
        return frozenset(output.dtype for output in self.goods.outputs)

    def tensors(self) -> Iterator[tuple[str, Shape, torch.dtype]]:
        """Name, shape and dtype of every HF tensor, in the order in which they are given out."""
        for message in self.messages:
            for output in map(self.goods.outputs.__getitem__, message.done):
                for name in (output.name, *output.copies):
                    yield name, output.shape, output.dtype


def _number(text: str) -> int:
    return zlib.crc32(text.encode())


def _experts(entry: Entry) -> str:
    return entry.held.mcore.partition(".experts.")[0]
