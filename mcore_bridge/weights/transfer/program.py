"""A plan as the moves of one rank: from its tensors to its windows, and from all windows to HF tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from mcore_bridge.weights.plan.export_plan import ExportPlan
from mcore_bridge.weights.plan.inventory import ParamEntry
from mcore_bridge.weights.plan.payload import OutputTensor
from mcore_bridge.weights.plan.stream import HEADER, WindowSlice
from mcore_bridge.weights.transfer.byte_copy import ByteCopy
from mcore_bridge.weights.transfer.copier import CopyTable
from mcore_bridge.weights.transfer.strided import Side, moves_of, stacked
from mcore_bridge.weights.transfer.window_order import Lineup, lineup

WINDOWS, HEADER_SENT, HEADERS, OWN_WINDOWS, OUTPUTS = range(5)
"""Buffers of a step, behind the tensors that this rank holds: the windows that have arrived, lined up; this rank's
header; the headers of all ranks; this rank's windows of the message that follows; and from here on outputs."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """Unpacks a message that has arrived, and packs one that follows. A rank's own tensors skip its windows."""

    moves: CopyTable
    held: tuple[int, ...]
    """Tensors of this rank that are read."""
    outputs: tuple[int, ...]
    """Outputs that something is written to."""
    alike: tuple[tuple[OutputTensor, tuple[int, ...]], ...]
    """The same by shape and dtype: one of them, and all like it."""
    lent: tuple[tuple[int, int], ...]
    """Outputs that lie whole in the windows that have arrived, and the byte at which they begin there."""


class Program:
    """The steps of one rank, made when they are first asked for.

    Args:
        plans: one that is for every rank alike, or one for each rank.
        rank: this one.
        num_stages: by which windows travel that one plan has for every rank, if not in one step.
    """

    def __init__(self, plans: Sequence[ExportPlan], rank: int, num_stages: int = 1) -> None:
        self._plans, self._rank = plans, rank
        self.is_gather = len(plans) == 1
        """Whether each rank sends one window to all, or one to each."""
        self._num_stages = num_stages if self.is_gather else 1
        self.plan = plans[0 if self.is_gather else rank]
        """What this rank gets."""
        goods = {
            id(plan.payload): plan.payload for plan in plans
        }.values()  # which those who ask for the same have alike
        held = {entry.held.name: None for each in goods for entry in each.entries if rank in _holders(entry)}
        self.names = tuple(held)
        """What this rank sends or keeps, by canonical name."""
        self._numbers = {name: number for number, name in enumerate(self.names)}
        self._steps: dict[tuple[int | None, int | None, bool, bool, bool], Step] = {}
        self._known: dict[tuple[object, ...], list[list[ByteCopy]]] = {}

    def balance(self) -> int:
        """A number for what this rank sends, less one for what it expects.

        Over all ranks of a group they add up to 0 where plans fit together, and where they do not hardly ever.
        """
        own, ranks = self._rank, range(len(self.plan.streams))
        if self.is_gather:
            return self.plan.checksum() * (len(ranks) * (own == 0) - 1)
        sent = sum(plan.stream_checksum(own, receiver) for receiver, plan in enumerate(self._plans))
        return sent - sum(self.plan.stream_checksum(sender, own) for sender in ranks)

    def received(self, number: int) -> tuple[int, ...]:
        """Bytes of each rank's window of a message, as they arrive here."""
        return self.plan.messages[number].widths

    def lineup(self, number: int) -> Lineup:
        """Where these windows lie."""
        return lineup(self.received(number), self._num_stages)

    def sent(self, number: int) -> tuple[int, ...]:
        """Bytes of this rank's window for each receiver, or of the one window that all of them get."""
        return tuple(plan.messages[number].widths[self._rank] for plan in self._plans)

    def room(self, number: int) -> tuple[int, int]:
        """Bytes of memory that a message lies in: the windows received, and those sent if not from among them."""
        return self.plan.messages[number].room, self._most_sent

    @cached_property
    def _most_sent(self) -> int:
        numbers = range(len(self.plan.messages))
        return 0 if self.is_gather else max(sum(self.sent(number)) for number in numbers)

    def step(
        self, arrived: int | None, following: int | None, *, unpack: bool = True, pack: bool = True, lend: bool = False
    ) -> Step:
        """The step between two messages, by number; of one that is not to be unpacked or packed, headers only.

        With ``lend``, what lies whole in a window is left there.
        """
        key = (arrived, following, unpack, pack, lend)
        if key not in self._steps:
            self._steps[key] = self._made(*key)
        return self._steps[key]

    def _made(self, arrived: int | None, following: int | None, unpack: bool, pack: bool, lend: bool) -> Step:
        moves: list[ByteCopy] = []
        held: set[int] = set()
        outputs: dict[int, list[ByteCopy]] = {}
        lent: dict[int, int] = {}
        if arrived is not None:
            windows = self.lineup(arrived)
            moves += self._headers_arrived(windows)
            for piece in self.plan.messages[arrived].pieces if unpack else ():
                self._unpack(piece, windows.starts[piece.sender], outputs)
                if piece.sender == self._rank:
                    held.add(self._number(self.plan.payload.entries[piece.entry]))
            done = self.plan.messages[arrived].done if lend else ()
            lent = {number: outputs.pop(number)[0].source_start for number in done if self._is_whole(number, outputs)}
            for place, found in enumerate(outputs.values(), len(self.names) + OUTPUTS):
                moves += (move._replace(target=place) for move in found)
        if following is not None:
            starts = tuple(accumulate(self.sent(following), initial=0))
            for receiver, (plan, start) in enumerate(zip(self._plans, starts, strict=False)):
                if self.is_gather or receiver != self._rank:
                    moves.append(self._header(HEADER_SENT, 0, OWN_WINDOWS, start))
                    for piece in plan.messages[following].pieces_of(self._rank) if pack else ():
                        entry = plan.payload.entries[piece.entry]
                        moves += self._packed(entry, piece, start)
                        held.add(self._number(entry))
        return Step(
            CopyTable(moves), tuple(sorted(held)), tuple(outputs), tuple(self._alike(outputs)), tuple(lent.items())
        )

    def _alike(self, outputs: Iterable[int]) -> Iterator[tuple[OutputTensor, tuple[int, ...]]]:
        groups: dict[tuple[object, ...], list[int]] = {}
        for number in outputs:
            output = self.plan.payload.outputs[number]
            groups.setdefault((output.dtype, output.shape), []).append(number)
        for numbers in groups.values():
            yield self.plan.payload.outputs[numbers[0]], tuple(numbers)

    def _number(self, entry: ParamEntry) -> int:
        return self._numbers[entry.held.name]

    def _header(self, source: int, source_start: int, target: int, target_start: int) -> ByteCopy:
        behind = len(self.names)
        places = behind + source, source_start, behind + target, target_start
        return ByteCopy(*places, 1, HEADER, 1, HEADER, 1, HEADER, 1)

    def _headers_arrived(self, windows: Lineup) -> Iterator[ByteCopy]:
        """All but this rank's own, which may be written to by now; those of a row of ranks at once."""
        for row in windows.rows:
            end = row.first + row.length
            for first, last in ((row.first, min(end, self._rank)), (max(row.first, self._rank + 1), end)):
                if first < last:
                    header = self._header(WINDOWS, windows.starts[first], HEADERS, first * HEADER)
                    yield header._replace(rows=last - first, source_row=row.distance or HEADER)

    def _packed(self, entry: ParamEntry, piece: WindowSlice, window: int) -> Iterator[ByteCopy]:
        target, start = len(self.names) + OWN_WINDOWS, window + piece.start
        if entry.starts is None:
            first, size = piece.first * entry.row_bytes, piece.count * entry.row_bytes
            item = entry.held.dtype.itemsize
            yield ByteCopy(self._number(entry), first, target, start, 1, size // item, item, size, item, size, item)
            return
        for move in self._moves(entry, piece, "held", "sent")[0]:
            yield move._replace(source=self._number(entry), target=target, target_start=start + move.target_start)

    def _unpack(self, piece: WindowSlice, window: int, outputs: dict[int, list[ByteCopy]]) -> None:
        """Add the moves of a piece to those of the outputs that it is a part of."""
        behind = len(self.names)
        entry, places = self.plan.payload.entries[piece.entry], self.plan.payload.destinations[piece.entry]
        is_own = piece.sender == self._rank
        source, start = (self._number(entry), 0) if is_own else (behind + WINDOWS, window + piece.start)
        for part, moves in enumerate(self._moves(entry, piece, "held" if is_own else "sent", "part")):
            output, base = places[part]
            if moves:
                found = outputs.setdefault(output, [])
                found += (ByteCopy(source, start + m.source_start, 0, base + m.target_start, *m[4:]) for m in moves)

    def _is_whole(self, number: int, outputs: Mapping[int, Sequence[ByteCopy]]) -> bool:
        """Whether an output is one stretch of the windows, in the order of its elements."""
        moves, output = outputs.get(number, ()), self.plan.payload.outputs[number]
        if len(moves) != 1 or moves[0].source != len(self.names) + WINDOWS:
            return False
        is_viewable = moves[0].source_start % output.dtype.itemsize == 0
        return is_viewable and moves[0].is_dense() and moves[0].num_bytes() == output.num_bytes

    def _moves(self, entry: ParamEntry, piece: WindowSlice, source: Side, target: Side) -> list[list[ByteCopy]]:
        """What of an entry is in a piece, from one place to another: for each part, or all at once where none is meant.

        Bytes count from the beginning of what is held, of the piece, and of the part.
        """
        key = (id(entry.trace), entry.held.dtype, piece.shard, piece.first, piece.count, source, target)
        if key not in self._known:
            found: list[list[ByteCopy]] = [[] for _ in (entry.hf if target == "part" else ("all",))]
            for copy, start in entry.copies_of(piece.shard):
                found[copy.part if target == "part" else 0] += moves_of(entry, piece, copy, start, source, target)
            self._known[key] = [stacked(moves) for moves in found]
        return self._known[key]


def _holders(entry: ParamEntry) -> set[int]:
    return {rank for holders in entry.holders.values() for rank in holders}
