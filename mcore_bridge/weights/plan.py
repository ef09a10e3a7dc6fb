"""Which bytes travel together and what they become: data, the same on every rank, made without a process group.

What a rank sends is one stream of bytes: its shards in order, cut into messages of equal size wherever a row ends. All
ranks send one window per message at the same time, so that all pipeline stages send at once, and the number of messages
depends on bytes alone. What several ranks hold alike, each of them sends a part of. An HF tensor is given out with the
message that completes it and all that an engine fuses with it in one load call.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from mcore_bridge.weights.alignment import aligned
from mcore_bridge.weights.cut import Cut, Part, Piece, Streams, cut, pieces
from mcore_bridge.weights.entries import Entry, Inventory, entries_of
from mcore_bridge.weights.layout import Axes
from mcore_bridge.weights.mapping import WeightMapping, unstacked
from mcore_bridge.weights.names import expert_of
from mcore_bridge.weights.trace import Shape

MIN_WINDOW = 4096
"""Bytes that a rank sends per message at least."""
AHEAD = 2
"""Messages that are on their way at once, each in memory of its own."""
MEMORY = 2_000_000_000
"""Bytes that an export takes beside the model, where nothing else is asked for and no HF tensor is too large."""
_MESSAGE = (64 << 20, 512 << 20)  # bytes that a rank receives: fewer are slow, more no faster
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
    """What travels at once: each rank sends a window of ``num_bytes``, and these outputs are complete with it."""

    number: int
    num_bytes: int
    done: tuple[int, ...]
    streams: Streams = field(repr=False, compare=False)
    """Those of the plan."""

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """What lies in the windows, found anew each time: all pieces of all messages would be many millions."""
        return tuple(pieces(self.streams, self.number))


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """All messages, in the order in which they travel; entries, outputs and ranks go by their places."""

    entries: tuple[Entry, ...]
    outputs: tuple[Output, ...]
    places: tuple[tuple[tuple[int, int], ...], ...]
    """For each part of each entry, its output and the byte at which it begins there."""
    streams: Streams
    messages: tuple[Message, ...]

    def tensors(self) -> Iterator[tuple[str, Shape, torch.dtype]]:
        """Name, shape and dtype of every HF tensor, in the order in which they are given out."""
        for message in self.messages:
            for output in map(self.outputs.__getitem__, message.done):
                for name in (output.name, *output.copies):
                    yield name, output.shape, output.dtype


def plan_export(
    mapping: WeightMapping, axes: Axes, num_layers: int, inventories: Sequence[Inventory], *, bucket_bytes: int | None
) -> ExportPlan:
    """Plan the export of a model whose ``inventories`` are given by rank of the group that exports it.

    Args:
        bucket_bytes: of the messages that are on their way to a rank; more where one row takes more. None is as many as
            leave the whole export within ``MEMORY``.

    Raises:
        MappingError: what ``entries_of`` raises.
    """
    entries = entries_of(mapping, axes, num_layers, inventories)
    outputs, places = _outputs(entries)
    together = _together(entries, places, bucket_bytes or MEMORY // 8)
    message_bytes = bucket_bytes // AHEAD if bucket_bytes else _message_bytes(outputs, places, together)
    window = max(message_bytes // len(inventories), MIN_WINDOW)
    found = cut(_deal(entries, len(inventories), window), [entry.held.row_bytes for entry in entries], window)
    widths = [found.width] * (found.num_messages - 1) + [found.last_width]  # the last alone is narrow: see ``Exchange``
    done = _done(found, places, together)
    messages = (Message(number, width, done[number], found.streams) for number, width in enumerate(widths))
    return ExportPlan(entries, outputs, places, found.streams, tuple(messages))


def _outputs(entries: Sequence[Entry]) -> tuple[tuple[Output, ...], tuple[tuple[tuple[int, int], ...], ...]]:
    outputs: list[Output] = []
    stacks: dict[str, int] = {}
    places = []
    for entry in entries:
        found = []
        for index, (hf, shape) in enumerate(zip(entry.hf, entry.trace.part_shapes, strict=True)):
            name, number = unstacked(hf)
            if number is None:
                outputs.append(Output(name, shape, entry.held.dtype, entry.copies if index == 0 else ()))
                found.append((len(outputs) - 1, 0))
                continue
            if name not in stacks:
                stacks[name] = len(outputs)
                outputs.append(Output(name, (entry.stack, *shape), entry.held.dtype))
            found.append((stacks[name], number * math.prod(shape) * entry.held.dtype.itemsize))
        places.append(tuple(found))
    return tuple(outputs), tuple(places)


def _message_bytes(
    outputs: Sequence[Output], places: Sequence[Sequence[tuple[int, int]]], keys: Sequence[object]
) -> int:
    """Bytes of a message, for an export that takes ``MEMORY``.

    At the worst there are: the messages on their way; what one more has become, and what a consumer still holds of the
    one before; the largest tensor; and groups of which some members have come, from one stage or several.
    """
    sizes: dict[object, dict[int, int]] = {}
    for key, found in zip(keys, places, strict=True):
        sizes.setdefault(key, {}).update((output, outputs[output].num_bytes) for output, _ in found)
    largest = max(output.num_bytes for output in outputs)
    group = max((size for each in sizes.values() if (size := sum(each.values())) < largest), default=0)
    return min(max((MEMORY - largest - group * 3 // 2) // (AHEAD + 2), _MESSAGE[0]), _MESSAGE[1])


def _deal(entries: Sequence[Entry], num_ranks: int, window: int) -> list[list[Part]]:
    """What each rank sends. Holders share a shard that matters, and others go to whoever has least to send so far."""
    streams: list[list[Part]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for index, entry in enumerate(entries):
        rows, row_bytes = entry.held.shape[0], entry.held.row_bytes
        for shard, holders in entry.holders.items():
            shares = len(holders) if entry.held.num_bytes * 8 > window and rows >= len(holders) else 1
            senders = holders if shares > 1 else (min(holders, key=loads.__getitem__),)
            for share, sender in enumerate(senders):
                first, last = rows * share // shares, rows * (share + 1) // shares
                streams[sender].append(Part(index, shard, first, last - first))
                loads[sender] += aligned((last - first) * row_bytes)
    return streams


def _together(entries: Sequence[Entry], places: Sequence[Sequence[tuple[int, int]]], bucket_bytes: int) -> list[object]:
    """For each entry a key: those of one key are given out together.

    An engine fuses, within one load call, projections of an attention; the parts of one parameter, such as gate and up;
    and the experts of a layer, which go together unless they alone fill more than a bucket.
    """
    layers: dict[str, int] = defaultdict(int)
    for entry in entries:
        if expert_of(entry.held.mcore) is not None:
            layers[_experts(entry)] += sum(map(math.prod, entry.trace.part_shapes)) * entry.held.dtype.itemsize
    keys: list[object] = []
    for entry, found in zip(entries, places, strict=True):
        if expert_of(entry.held.mcore) is None:
            fused = _FUSED.match(entry.held.mcore)
            keys.append(fused[1] if fused else entry.held.mcore)
        else:
            keys.append(_experts(entry) if layers[_experts(entry)] <= bucket_bytes else found[0][0])
    return keys


def _experts(entry: Entry) -> str:
    return entry.held.mcore.partition(".experts.")[0]


def _done(found: Cut, places: Sequence[Sequence[tuple[int, int]]], keys: Sequence[object]) -> list[tuple[int, ...]]:
    """For each message the outputs to give out after it, in the order of their entries."""
    last: dict[object, int] = {}
    for stream in found.streams:
        for run in stream:
            key = keys[run.entry]
            last[key] = max(last.get(key, 0), run.last())
    groups: dict[object, dict[int, None]] = {}
    for key, place in zip(keys, places, strict=True):
        groups.setdefault(key, {}).update(dict.fromkeys(output for output, _ in place))
    done: list[list[int]] = [[] for _ in range(found.num_messages)]
    for key, outputs in groups.items():
        done[last[key]] += outputs
    return [tuple(each) for each in done]
