"""Moves of bytes between buffers: on a GPU all at once by one kernel, elsewhere one after the other.

A move copies ``rows`` times ``cols`` elements of ``item`` bytes; in either buffer it begins at a byte, and its rows and
columns lie so many bytes apart. Every copy that a layout needs is one move or a few.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from mcore_bridge.weights.kernel import Launch

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
WIDEST = 16  # bytes that a thread of a GPU moves at once
Table = np.ndarray[tuple[int, int], np.dtype[np.int64]]
Addresses = np.ndarray[tuple[int], np.dtype[np.int64]]


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


class Buffers:
    """Contiguous tensors that moves count from the first byte of, and what a kernel needs to know of them."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors

    @cached_property
    def addresses(self) -> Addresses:
        """Where they begin."""
        return np.array([tensor.data_ptr() for tensor in self.tensors], dtype=np.int64)

    @cached_property
    def is_aligned(self) -> bool:
        """Whether all begin where the widest words can."""
        return not (self.addresses % WIDEST).any()

    @cached_property
    def on_gpu(self) -> bool:
        """Whether a kernel reaches all of them: they are on a GPU, or pinned on the host."""
        return all(tensor.is_cuda or tensor.is_pinned() for tensor in self.tensors)


class Moves:
    """A table of moves that write to different places, and what was worked out to make them."""

    def __init__(self, moves: Iterable[Move]) -> None:
        self.table: Table = np.array([*moves], dtype=np.int64).reshape(-1, len(Move._fields))
        self._launches: dict[bool, tuple[Launch, ...]] = {}

    def make(self, sources: Sequence[Buffers], targets: Sequence[Buffers], device: torch.device) -> None:
        """Copy on the current stream of ``device``, without waiting, and in any order.

        Args:
            sources: moves count on from the buffers of one to those of the next.
            targets: likewise. No move may read what another one writes.
            device: where most of them are.
        """
        if device.type == "cuda" and _has_triton() and all(each.on_gpu for each in (*sources, *targets)):
            self._launch(sources, targets, device)
            return
        near = [tensor for each in sources for tensor in each.tensors]
        far = [tensor for each in targets for tensor in each.tensors]
        for row in self.table.tolist():
            move = Move(*row)
            source = _words(near[move.source], move, (move.source_start, move.source_row, move.source_col))
            target = _words(far[move.target], move, (move.target_start, move.target_row, move.target_col))
            target.copy_(source)

    def _launch(self, sources: Sequence[Buffers], targets: Sequence[Buffers], device: torch.device) -> None:
        from mcore_bridge.weights.kernel import launch, prepare

        aligned = all(each.is_aligned for each in (*sources, *targets))
        if aligned not in self._launches:
            self._launches[aligned] = prepare(self.table, aligned=aligned)
        near, far = (np.concatenate([each.addresses for each in buffers]) for buffers in (sources, targets))
        launch(self._launches[aligned], near, far, device)


def _words(buffer: Tensor, move: Move, place: tuple[int, int, int]) -> Tensor:
    """The elements of a move in a buffer, as whole numbers, which every copy keeps bit for bit."""
    start, row, col = (num_bytes // move.item for num_bytes in place)
    flat = buffer.detach().view(-1).view(_WORDS[move.item])
    return flat.as_strided((move.rows, move.cols), (row, col), flat.storage_offset() + start)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
