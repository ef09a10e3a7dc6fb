"""A plan as copies of bytes on one rank: from its tensors to its windows, and from all windows to HF tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, zip_longest
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from mcore_bridge.rules.trace import Copy
from mcore_bridge.weights.plan.boxes import BoxCopy, ByteCopy, joined, stacked
from mcore_bridge.weights.plan.export_plan import LAG, MESSAGES_IN_FLIGHT, ExportPlan
from mcore_bridge.weights.plan.inventory import ParamEntry
from mcore_bridge.weights.plan.payload import OutputTensor
from mcore_bridge.weights.plan.stream import HEADER, WindowRun, WindowSlice
from mcore_bridge.weights.transfer.collectives import Lineup, lineup
from mcore_bridge.weights.transfer.copier import CopyTable

WINDOWS, HEADER_SENT, OWN_WINDOWS, OUTPUTS = range(4)
"""Buffers of a step; their numbers follow the numbers of the tensors that this rank holds.

In this order: the arrived windows, this rank's header, this rank's windows of the next message, and then outputs.
"""


Side = Literal["held", "sent", "part"]
"""One of three buffers: the tensor of a rank, the sent part of it, or a part of an HF tensor."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """Unpack a message that has arrived, and pack the next one. A rank's own tensors do not pass through windows."""

    copies: CopyTable
    held: tuple[int, ...]
    """Tensors of this rank that the step reads, by index."""
    outputs: tuple[int, ...]
    """Outputs that the step writes to, by index."""
    alike: tuple[tuple[OutputTensor, tuple[int, ...]], ...]
    """These outputs, grouped by shape and dtype: one output of each group, and the indices of all its outputs."""
    lent: tuple[tuple[int, int], ...]
    """Outputs that lie whole in the arrived windows, with the byte at which they begin there."""


class Program:
    """The steps of one rank. Each step is computed on first use, and cached.

    Args:
        plans: one plan for all ranks alike, or one for each receiver.
        rank: this rank.
        num_stages: pipeline stages by which windows of one plan travel, if they do not travel in one collective.
    """

    def __init__(self, plans: Sequence[ExportPlan], rank: int, num_stages: int = 1) -> None:
        self.plans, self.rank = plans, rank
        self.is_gather = len(plans) == 1
        """Whether each rank sends one window to all receivers. Otherwise it sends one to each."""
        self.num_stages = num_stages if self.is_gather else 1
        self.plan = plans[0 if self.is_gather else rank]
        """The plan of the tensors that this rank gets."""
        payloads = {id(plan.payload): plan.payload for plan in plans}  # receivers with one target share an object
        self.entries = tuple(entry for payload in payloads.values() for entry in payload.entries)
        """What any receiver gets, in one order on all ranks."""
        held = {
            entry.held.name: (entry if entry.encoded is None else entry.encoded.plain).held.name
            for entry in self.entries
            if any(rank in holders for holders in entry.holders.values())
        }
        self.names = tuple(held)
        """The canonical names of the tensors that this rank sends, or copies to its own outputs."""
        self.parameters = tuple(dict.fromkeys(held.values()))
        """The canonical names of the parameters of which these are made. Codes and scales are made of one."""
        places = {name: place for place, name in enumerate(self.parameters)}
        self.made_of = np.array([places[name] for name in held.values()], dtype=np.int64)
        """For each of ``names`` the place of its parameter in ``parameters``."""
        self._numbers = {name: number for number, name in enumerate(self.names)}
        self._steps: dict[tuple[int | None, int | None, bool, bool, bool], Step] = {}
        self._headers: dict[Lineup, CopyTable] = {}
        self._known: dict[tuple[object, ...], list[list[ByteCopy]]] = {}

    @cached_property
    def idle_after(self) -> dict[int, list[int]]:
        """For each message, the indices of this rank's tensors that the next messages do not need.

        Different receivers may get parts of a tensor at different times.
        """
        spans: dict[int, list[tuple[int, int]]] = {}
        for entry, run in _runs(self):
            spans.setdefault(self._number(entry), []).append((run.message, run.last()))
        idle: dict[int, list[int]] = {}
        for number, messages in spans.items():
            ends = accumulate((last for _, last in sorted(messages)), max)
            starts = [first for first, _ in sorted(messages)][1:]
            for end, start in zip_longest(ends, starts, fillvalue=len(self.plan.messages) + MESSAGES_IN_FLIGHT + 1):
                if start > end + MESSAGES_IN_FLIGHT + 1:
                    idle.setdefault(end, []).append(number)
        return idle

    @cached_property
    def read(self) -> frozenset[str]:
        """The canonical names of the tensors that steps of this rank read. Of equal holders one is read."""
        return frozenset(entry.held.name for entry, _ in _runs(self))

    def balance(self) -> int:
        """A hash of what this rank sends, minus a hash of what it expects.

        If the plans fit together, the sum over all ranks of a group is 0. Otherwise it is almost never 0.
        """
        own, ranks = self.rank, range(len(self.plan.streams))
        if self.is_gather:
            return self.plan.checksum() * (len(ranks) * (own == 0) - 1)
        sent = sum(plan.stream_checksum(own, receiver) for receiver, plan in enumerate(self.plans))
        return sent - sum(self.plan.stream_checksum(sender, own) for sender in ranks)

    def received(self, number: int) -> tuple[int, ...]:
        """The sizes in bytes of the windows that this rank receives with a message, by the rank that sends them."""
        return self.plan.messages[number].widths

    def lineup(self, number: int) -> Lineup:
        """The positions of the windows of a message after their arrival."""
        return lineup(self.received(number), self.num_stages)

    def headers(self, number: int) -> CopyTable:
        """The copies of the headers of a message, from its windows to uint8 [ranks, HEADER].

        This rank's header is left out. It does not travel if each rank sends one window to each receiver.
        """
        windows = self.lineup(number)
        if windows not in self._headers:
            self._headers[windows] = CopyTable(_of_headers(windows, self.rank))
        return self._headers[windows]

    def sent(self, number: int) -> tuple[int, ...]:
        """Bytes of this rank's window for each receiver, or of its single window for all receivers."""
        return tuple(plan.messages[number].widths[self.rank] for plan in self.plans)

    def room(self, number: int) -> tuple[int, int]:
        """Bytes of memory for a message: for received windows, and for sent windows if they need separate memory."""
        return self.plan.messages[number].room, self._most_sent

    @cached_property
    def _most_sent(self) -> int:
        numbers = range(len(self.plan.messages))
        return 0 if self.is_gather else max(sum(self.sent(number)) for number in numbers)

    def step(
        self, arrived: int | None, following: int | None, *, unpack: bool = True, pack: bool = True, lend: bool = False
    ) -> Step:
        """The step between two messages.

        Args:
            arrived, following: the numbers of the message to unpack and of the message to pack.
            unpack, pack: whether to do this; otherwise only this rank's header is copied.
            lend: do not copy outputs that lie whole in a window.
        """
        key = (arrived, following, unpack, pack, lend)
        if key not in self._steps:
            self._steps[key] = self._made(*key)
        return self._steps[key]

    def _made(self, arrived: int | None, following: int | None, unpack: bool, pack: bool, lend: bool) -> Step:
        byte_copies: list[ByteCopy] = []
        held: set[int] = set()
        outputs: dict[int, list[ByteCopy]] = {}
        lent: dict[int, int] = {}
        if arrived is not None and unpack:
            outputs = dict(self._written(arrived))
            pieces = self.plan.messages[arrived].pieces_of(self.rank)
            held |= {self._number(self.plan.payload.entries[piece.entry]) for piece in pieces}
            done = self.plan.messages[arrived].done if lend else ()
            lent = {number: outputs.pop(number)[0].source_start for number in done if self._is_whole(number, outputs)}
            for buffer, of_output in enumerate(outputs.values(), len(self.names) + OUTPUTS):
                byte_copies += (byte_copy._replace(target=buffer) for byte_copy in of_output)
        if following is not None:
            starts = tuple(accumulate(self.sent(following), initial=0))
            for receiver, (plan, start) in enumerate(zip(self.plans, starts, strict=False)):
                if self.is_gather or receiver != self.rank:
                    byte_copies.append(self._run(HEADER_SENT, 0, OWN_WINDOWS, start))
                    if (passed := plan.messages[following].passed_on(self.rank)) and pack:
                        assert arrived == following - LAG, "the windows of another message"
                        byte_copies.append(self._run(WINDOWS, passed.start, OWN_WINDOWS, start + HEADER, len(passed)))
                    for piece in plan.messages[following].pieces_of(self.rank) if pack else ():
                        entry = plan.payload.entries[piece.entry]
                        byte_copies += self._packed(entry, piece, start)
                        held.add(self._number(entry))
        return Step(
            CopyTable(byte_copies),
            tuple(sorted(held)),
            tuple(outputs),
            tuple(self._alike(outputs)),
            tuple(lent.items()),
        )

    def _written(self, arrived: int) -> dict[int, list[ByteCopy]]:
        """The copies that unpack a message, by the outputs to which they write. Their targets are filled in later."""
        outputs: dict[int, list[ByteCopy]] = {}
        windows = self.lineup(arrived)
        for piece in self.plan.messages[arrived].pieces:
            self._unpack(piece, windows.starts[piece.sender], outputs)
        return outputs

    def _alike(self, outputs: Iterable[int]) -> Iterator[tuple[OutputTensor, tuple[int, ...]]]:
        groups: dict[tuple[object, ...], list[int]] = {}
        for number in outputs:
            output = self.plan.payload.outputs[number]
            groups.setdefault((output.dtype, output.shape), []).append(number)
        for numbers in groups.values():
            yield self.plan.payload.outputs[numbers[0]], tuple(numbers)

    def _number(self, entry: ParamEntry) -> int:
        return self._numbers[entry.held.name]

    def _run(self, source: int, source_start: int, target: int, target_start: int, size: int = HEADER) -> ByteCopy:
        """Consecutive bytes between two of the buffers of a step."""
        first = len(self.names)
        return ByteCopy(first + source, source_start, first + target, target_start, 1, size, 1, size, 1, size, 1)

    def _packed(self, entry: ParamEntry, piece: WindowSlice, window: int) -> Iterator[ByteCopy]:
        target, start = len(self.names) + OWN_WINDOWS, window + piece.start
        if entry.starts is None:
            first, size = piece.first * entry.row_bytes, piece.count * entry.row_bytes
            item = entry.held.dtype.itemsize
            yield ByteCopy(self._number(entry), first, target, start, 1, size // item, item, size, item, size, item)
            return
        for byte_copy in self._byte_copies(entry, piece, "held", "sent")[0]:
            yield byte_copy._replace(
                source=self._number(entry), target=target, target_start=start + byte_copy.target_start
            )

    def _unpack(self, piece: WindowSlice, window: int, outputs: dict[int, list[ByteCopy]]) -> None:
        """Add the copies of a piece to the copies of the outputs that contain it."""
        payload = self.plan.payload
        entry, destinations = payload.entries[piece.entry], payload.destinations[piece.entry]
        is_own = piece.sender == self.rank
        source, start = (self._number(entry), 0) if is_own else (len(self.names) + WINDOWS, window + piece.start)
        for part, byte_copies in enumerate(self._byte_copies(entry, piece, "held" if is_own else "sent", "part")):
            output, base = destinations[part]
            if byte_copies:
                outputs.setdefault(output, []).extend(
                    ByteCopy(source, start + byte_copy.source_start, 0, base + byte_copy.target_start, *byte_copy[4:])
                    for byte_copy in byte_copies
                )

    def _is_whole(self, number: int, outputs: Mapping[int, Sequence[ByteCopy]]) -> bool:
        """Whether an output is contiguous in the windows, in the order of its elements."""
        byte_copies, output = outputs.get(number, ()), self.plan.payload.outputs[number]
        if len(byte_copies) != 1 or byte_copies[0].source != len(self.names) + WINDOWS:
            return False
        is_viewable = byte_copies[0].source_start % output.dtype.itemsize == 0
        return is_viewable and byte_copies[0].is_dense() and byte_copies[0].num_bytes() == output.num_bytes

    def _byte_copies(self, entry: ParamEntry, piece: WindowSlice, source: Side, target: Side) -> list[list[ByteCopy]]:
        """The copies of a piece between two sides: a list for each part if ``target`` is "part", else one list.

        Bytes count from the beginning of the held tensor, of the piece, or of the part.
        """
        key = (id(entry.trace), entry.held.dtype, piece.shard, piece.first, piece.count, source, target)
        if key not in self._known:
            by_part: list[list[ByteCopy]] = [[] for _ in (entry.hf if target == "part" else ("all",))]
            for copy, start in entry.copies_of(piece.shard):
                part = copy.part if target == "part" else 0
                box = _box(entry, piece, copy, start, source, target)
                by_part[part] += ByteCopy.of(box, entry.held.dtype.itemsize) if box else ()
            self._known[key] = [stacked(byte_copies) for byte_copies in by_part]
        return self._known[key]


def _of_headers(windows: Lineup, rank: int) -> Iterator[ByteCopy]:
    for row in windows.rows:
        end = row.first + row.length
        for first, last in ((row.first, min(end, rank)), (max(row.first, rank + 1), end)):
            if first < last:
                start, distance = windows.starts[first], row.distance or HEADER
                yield ByteCopy(0, start, 1, first * HEADER, last - first, HEADER, 1, distance, 1, HEADER, 1)


def _runs(program: Program) -> Iterator[tuple[ParamEntry, WindowRun]]:
    """What the rank of a program sends or copies, for each receiver."""
    for plan in {id(plan): plan for plan in program.plans}.values():
        for run in plan.streams[program.rank]:
            yield plan.payload.entries[run.entry], run


def _box(entry: ParamEntry, piece: WindowSlice, copy: Copy, start: int, source: Side, target: Side) -> BoxCopy | None:
    """The part of ``copy`` in the rows of ``piece``, in elements of the two sides; None if there is none.

    Args:
        start: where ``copy`` begins in the sent part, along its dim.
    """
    offset = start if copy.dim == 0 else 0  # row 0 of the views is this row of the sent part
    near, far = (_view(entry, copy, start, side) for side in (source, target))
    first = max(piece.first, offset) - offset
    last = min(piece.first + piece.count, offset + near.shape[0]) - offset
    if first >= last:
        return None
    sizes, item = (last - first, *near.shape[1:]), entry.held.dtype.itemsize
    (near_row, *_), (far_row, *_) = strides = near.stride(), far.stride()
    before = {"held": 0, "sent": piece.first * entry.row_bytes // item, "part": 0}
    return BoxCopy(
        int(near.storage_offset()) + first * near_row - before[source],
        int(far.storage_offset()) + first * far_row - before[target],
        joined(zip(sizes, *strides, strict=True)),
    )


def _view(entry: ParamEntry, copy: Copy, start: int, side: Side) -> Tensor:
    """The elements of ``copy`` on one side, as a view without storage."""
    if side == "held":
        return copy.of_shard(torch.empty(entry.held.shape, device="meta"))
    if side == "sent":
        return torch.empty(entry.sent, device="meta").narrow(copy.dim, start, copy.size)
    return copy.of_part(torch.empty(entry.trace.part_shapes[copy.part], device="meta"))
