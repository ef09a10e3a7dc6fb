"""Moves of bytes between buffers: on a GPU all at once by one kernel, elsewhere one after the other.

A move copies ``rows`` times ``cols`` elements of ``item`` bytes; in either buffer it begins at a byte, and its rows and
columns lie so many bytes apart. Every copy that a layout needs is one move or a few.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from mcore_bridge.weights.kernel import Launch

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Table = np.ndarray[tuple[int, int], np.dtype[np.int64]]


class Move(NamedTuple):
    """From buffer number ``source`` to buffer number ``target``; all but ``rows`` and ``cols`` are bytes."""

    source: int
    source_start: int
    target: int
    target_start: int
    rows: int
    cols: int
    item: int
    source_row: int
    source_col: int
    target_row: int
    target_col: int


class Moves:
    """A table of moves that write to different places, and what was worked out to make them."""

    def __init__(self, moves: Iterable[Move]) -> None:
        self.table: Table = np.array([*moves], dtype=np.int64).reshape(-1, len(Move._fields))
        self._launches: dict[bool, tuple[Launch, ...]] = {}

    def make(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Copy on the current stream, without waiting, and in any order.

        Args:
            sources: contiguous; moves count from their first byte.
            targets: likewise. None of them shares memory with a source.
        """
        if not len(self.table):
            return
        if _has_triton() and any(buffer.is_cuda for buffer in targets) and all(map(_on_gpu, (*sources, *targets))):
            self._launch(sources, targets)
            return
        for row in self.table.tolist():
            move = Move(*row)
            near, far = sources[move.source], targets[move.target]
            source = _words(near, move, (move.source_start, move.source_row, move.source_col))
            target = _words(far, move, (move.target_start, move.target_row, move.target_col))
            target.copy_(source)

    def _launch(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        from mcore_bridge.weights.kernel import is_aligned, launch, prepare

        near = [buffer.data_ptr() for buffer in sources]
        far = [buffer.data_ptr() for buffer in targets]
        aligned = is_aligned(near) and is_aligned(far)
        if aligned not in self._launches:
            self._launches[aligned] = prepare(self.table, aligned=aligned)
        launch(self._launches[aligned], near, far, next(buffer.device for buffer in targets if buffer.is_cuda))


class Part(NamedTuple):
    """Moves between buffers of their own."""

    moves: Moves
    num_sources: int
    num_targets: int


def joined(parts: Iterable[Part]) -> Moves:
    """All parts as one table, whose buffers are those of the first part, then of the second, and so on."""
    moves, tables, sources, targets = Moves(()), [], 0, 0
    for part in parts:
        shift = np.zeros(len(Move._fields), dtype=np.int64)
        shift[0], shift[2] = sources, targets
        tables.append(part.moves.table + shift)
        sources, targets = sources + part.num_sources, targets + part.num_targets
    moves.table = np.concatenate([moves.table, *tables])
    return moves


def _on_gpu(buffer: Tensor) -> bool:
    """Whether a kernel reaches a buffer: on the GPU, or pinned on the host."""
    return buffer.is_cuda or buffer.is_pinned()


def _words(buffer: Tensor, move: Move, place: tuple[int, int, int]) -> Tensor:
    """The elements of a move in a buffer, as whole numbers, which every copy keeps bit for bit."""
    start, row, col = (num_bytes // move.item for num_bytes in place)
    flat = buffer.detach().view(-1).view(_WORDS[move.item])
    return flat.as_strided((move.rows, move.cols), (row, col), flat.storage_offset() + start)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
