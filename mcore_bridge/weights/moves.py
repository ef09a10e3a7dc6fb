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
    """A table of moves that write to different places, and what was worked out to run it."""

    def __init__(self, moves: Iterable[Move]) -> None:
        self.table: Table = np.array([*moves], dtype=np.int64).reshape(-1, len(Move._fields))
        self._launches: dict[bool, tuple[Launch, ...]] = {}

    def launches(self, *, aligned: bool) -> tuple[Launch, ...]:
        """What the kernel runs, for buffers that begin at multiples of 16 bytes or not."""
        if aligned not in self._launches:
            from mcore_bridge.weights.kernel import prepare

            self._launches[aligned] = prepare(self.table, aligned=aligned)
        return self._launches[aligned]


class Job(NamedTuple):
    """Moves, and the buffers between which they are made: contiguous, and counted from their first byte."""

    moves: Moves
    sources: Sequence[Tensor]
    targets: Sequence[Tensor]


def run(*jobs: Job) -> None:
    """Copy on the current stream, without waiting, and in any order: what one job writes no other may read or write."""
    if _has_triton() and any(buffer.is_cuda for job in jobs for buffer in job.targets) and all(map(_on_gpu, jobs)):
        from mcore_bridge.weights.kernel import launch

        launch(jobs)
        return
    for job in jobs:
        for row in job.moves.table.tolist():
            move = Move(*row)
            near, far = job.sources[move.source], job.targets[move.target]
            source = _words(near, move, (move.source_start, move.source_row, move.source_col))
            target = _words(far, move, (move.target_start, move.target_row, move.target_col))
            target.copy_(source)


def _on_gpu(job: Job) -> bool:
    """Whether a kernel reaches all buffers: those of the GPU, and pinned ones of the host."""
    return all(buffer.is_cuda or buffer.is_pinned() for buffer in (*job.sources, *job.targets))


def _words(buffer: Tensor, move: Move, place: tuple[int, int, int]) -> Tensor:
    """The elements of a move in a buffer, as whole numbers, which every copy keeps bit for bit."""
    start, row, col = (num_bytes // move.item for num_bytes in place)
    flat = buffer.detach().view(-1).view(_WORDS[move.item])
    return flat.as_strided((move.rows, move.cols), (row, col), flat.storage_offset() + start)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
