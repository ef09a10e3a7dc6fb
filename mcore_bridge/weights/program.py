"""A plan as the moves of one rank: from its tensors to its windows, and from all windows to HF tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mcore_bridge.weights.cut import HEADER, Piece
from mcore_bridge.weights.entries import Entry
from mcore_bridge.weights.moves import Move, Moves
from mcore_bridge.weights.plan import ExportPlan, Message
from mcore_bridge.weights.trace import Copy

WINDOWS, HEADER_SENT, HELD = 0, 1, 2
"""Sources of a step: the windows of all ranks that have arrived, one behind the other; this rank's header; and from
here on what this rank holds of each entry."""
HEADERS, OWN_WINDOW, OUTPUTS = 0, 1, 2
"""Targets: the headers of all ranks; this rank's window of the message that follows; and the outputs of the step."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """Unpacks a message that has arrived, and packs one that follows. A rank's own tensors skip its window."""

    moves: Moves
    held: tuple[int, ...]
    """Entries that are read from this rank's own tensors."""
    outputs: tuple[int, ...]
    """Outputs that something is written to."""


class Program:
    """The steps of one rank, made when they are first asked for."""

    def __init__(self, plan: ExportPlan, rank: int, num_ranks: int) -> None:
        self.plan, self._rank, self._num_ranks = plan, rank, num_ranks
        self._steps: dict[tuple[int | None, int | None, bool, bool], Step] = {}
        self._known: dict[tuple[int, ...], list[list[Move]]] = {}

    def step(self, arrived: int | None, following: int | None, *, unpack: bool = True, pack: bool = True) -> Step:
        """The step between two messages, by number; of one that is not to be unpacked or packed, headers only."""
        key = (arrived, following, unpack, pack)
        if key not in self._steps:
            self._steps[key] = self._made(*key)
        return self._steps[key]

    def _made(self, arrived: int | None, following: int | None, unpack: bool, pack: bool) -> Step:
        moves: list[Move] = []
        held: set[int] = set()
        outputs: dict[int, int] = {}
        if arrived is not None:
            message = self.plan.messages[arrived]
            if self._num_ranks > 1:
                ranks, width = self._num_ranks, message.num_bytes
                moves.append(Move(WINDOWS, 0, HEADERS, 0, ranks, HEADER, 1, width, 1, HEADER, 1))
            for piece in message.pieces if unpack else ():
                moves += self._unpacked(piece, message, outputs)
                held |= {piece.entry} if piece.sender == self._rank else set()
        if following is not None:
            moves.append(Move(HEADER_SENT, 0, OWN_WINDOW, 0, 1, HEADER, 1, HEADER, 1, HEADER, 1))
            for piece in self.plan.messages[following].pieces if pack else ():
                if piece.sender == self._rank:
                    moves.append(self._packed(piece))
                    held.add(piece.entry)
        return Step(Moves(moves), tuple(sorted(held)), tuple(outputs))

    def _packed(self, piece: Piece) -> Move:
        item, first, size = self._bytes(piece)
        return Move(HELD + piece.entry, first, OWN_WINDOW, piece.start, 1, size // item, item, size, item, size, item)

    def _unpacked(self, piece: Piece, message: Message, outputs: dict[int, int]) -> Iterator[Move]:
        """To ``outputs``, which are numbered as they come."""
        source, start = WINDOWS, piece.sender * message.num_bytes + piece.start
        if piece.sender == self._rank:
            source, start = HELD + piece.entry, self._bytes(piece)[1]
        for part, moves in enumerate(self._moves(piece)):
            output, base = self.plan.places[piece.entry][part]
            for move in moves:
                target = OUTPUTS + outputs.setdefault(output, len(outputs))
                yield Move(source, start + move.source_start, target, base + move.target_start, *move[4:])

    def _bytes(self, piece: Piece) -> tuple[int, int, int]:
        """Of an element; before the piece, in its shard; of the piece."""
        held = self.plan.entries[piece.entry].held
        return held.dtype.itemsize, piece.first * held.row_bytes, piece.count * held.row_bytes

    def _moves(self, piece: Piece) -> list[list[Move]]:
        """For each part of the piece's entry the moves from the piece, which begins at byte 0, to the part."""
        entry = self.plan.entries[piece.entry]
        key = (id(entry.trace), entry.held.dtype.itemsize, piece.shard, piece.first, piece.count)
        if key not in self._known:
            self._known[key] = [_of_part(entry, part, piece) for part in range(len(entry.hf))]
        return self._known[key]


def _of_part(entry: Entry, part: int, piece: Piece) -> list[Move]:
    moves: list[Move] = []
    for copy in entry.trace.to_hf:
        if copy.part == part and copy.shard == piece.shard:
            moves += _of_copy(entry, copy, piece)
    return list(_stacked(moves))


def _of_copy(entry: Entry, copy: Copy, piece: Piece) -> Iterator[Move]:
    """What of ``copy`` lies in the rows of ``piece``."""
    held = torch.empty(entry.held.shape, dtype=entry.held.dtype, device="meta")
    source = copy.of_shard(held)
    target = copy.of_part(torch.empty(entry.trace.part_shapes[copy.part], dtype=entry.held.dtype, device="meta"))
    offset = copy.shard_start if copy.dim == 0 else 0  # the row of the shard that is row 0 of both views
    first = max(piece.first, offset) - offset
    last = min(piece.first + piece.count, offset + source.shape[0]) - offset
    if first >= last:
        return
    item = entry.held.dtype.itemsize
    before = piece.first * held.stride(0)
    yield from _rectangles(
        (last - first, *source.shape[1:]),
        [stride * item for stride in source.stride()],
        [stride * item for stride in target.stride()],
        int(source.storage_offset() + first * source.stride(0) - before) * item,
        int(target.storage_offset() + first * target.stride(0)) * item,
        item,
    )


def _rectangles(
    shape: Sequence[int], source: Sequence[int], target: Sequence[int], start: int, target_start: int, item: int
) -> Iterator[Move]:
    """A copy between two strided views, as one move where at most two dims are left after merging, else several."""
    dims: list[tuple[int, int, int]] = []
    for size, near, far in zip(shape, source, target, strict=True):
        if dims and dims[-1][1:] == (size * near, size * far):
            dims[-1] = (dims[-1][0] * size, near, far)
        elif size > 1:
            dims.append((size, near, far))
    if len(dims) < 2:
        run = bool(dims) and dims[0][1:] == (item, item)
        dims = [(1, 0, 0), *dims] if run else [*(dims or [(1, 0, 0)]), (1, item, item)]
    *outer, rows, cols = dims
    for index in np.ndindex(*(size for size, _, _ in outer)):
        yield Move(
            *(0, start + sum(i * near for i, (_, near, _) in zip(index, outer, strict=True))),
            *(0, target_start + sum(i * far for i, (_, _, far) in zip(index, outer, strict=True))),
            *(rows[0], cols[0], item, rows[1], cols[1], rows[2], cols[2]),
        )


def _stacked(moves: Iterable[Move]) -> Iterator[Move]:
    """Equal runs at equal distances become the rows of one move."""
    found: Move | None = None
    for move in moves:
        joined = None if found is None else _joined(found, move)
        if found is not None and joined is None:
            yield found
        found = joined or move
    if found is not None:
        yield found


def _joined(found: Move, move: Move) -> Move | None:
    """``found`` with the one row of ``move`` below its own, if it stands where that would."""
    if move.rows != 1 or (move.cols, move.item) != (found.cols, found.item):
        return None
    if (move.source_col, move.target_col) != (found.source_col, found.target_col):
        return None
    near = (move.source_start - found.source_start) // found.rows
    far = (move.target_start - found.target_start) // found.rows
    if min(near, far) < 0 or (found.rows > 1 and (found.source_row, found.target_row) != (near, far)):
        return None
    ends = (found.source_start + near * found.rows, found.target_start + far * found.rows)
    if ends != (move.source_start, move.target_start):
        return None
    return found._replace(rows=found.rows + 1, source_row=near, target_row=far)
