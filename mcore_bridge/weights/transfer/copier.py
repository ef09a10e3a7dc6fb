"""Moves of bytes between buffers: on a GPU all at once by one kernel, elsewhere one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, cached_property
from importlib.util import find_spec
from threading import Thread
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mcore_bridge.weights.transfer.byte_copy import WIDEST, ByteCopy, Table

if TYPE_CHECKING:
    from mcore_bridge.weights.transfer.triton_copy import Launch

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Addresses = np.ndarray[tuple[int], np.dtype[np.int64]]


class Buffers:
    """Contiguous tensors that moves count from the first byte of, and what a kernel needs to know of them."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self._on_device: dict[torch.device, Tensor] = {}

    @cached_property
    def addresses(self) -> Addresses:
        """Where they begin."""
        return np.array([tensor.data_ptr() for tensor in self.tensors], dtype=np.int64)

    def addresses_on(self, device: torch.device) -> Tensor:
        """The same as a tensor on a GPU, sent there once: int64 [buffers]."""
        if device not in self._on_device:
            pinned = torch.empty(len(self.tensors), dtype=torch.int64, pin_memory=True)
            pinned.numpy()[:] = self.addresses
            self._on_device[device] = pinned.to(device, non_blocking=True)
        return self._on_device[device]

    @cached_property
    def is_aligned(self) -> bool:
        """Whether all begin where the widest words can."""
        return not (self.addresses % WIDEST).any()

    @cached_property
    def on_gpu(self) -> bool:
        """Whether a kernel reaches all of them: they are on a GPU, or pinned on the host."""
        return all(tensor.is_cuda or tensor.is_pinned() for tensor in self.tensors)


class CopyTable:
    """A table of moves that write to different places, and what was worked out to make them."""

    def __init__(self, moves: Iterable[ByteCopy]) -> None:
        self.table: Table = np.array([*moves], dtype=np.int64).reshape(-1, len(ByteCopy._fields))
        self._launches: dict[bool, tuple[Launch, ...]] = {}

    def run(self, staying: Buffers, passing: Buffers, device: torch.device) -> None:
        """Copy on the current stream of ``device``, without waiting, and in any order.

        No move may read what another one writes.

        Args:
            staying: the buffers that moves count first, which many tables share: anywhere, and of any address.
            passing: those that they count on with, on ``device`` or pinned; they begin where the widest words can.
            device: where most of them are.
        """
        if device.type == "cuda" and _has_triton() and staying.on_gpu:
            self._launch(staying, passing, device)
            return
        tensors = [*staying.tensors, *passing.tensors]
        for row in self.table.tolist():
            move = ByteCopy(*row)
            source = _words(tensors[move.source], move, (move.source_start, move.source_row, move.source_col))
            target = _words(tensors[move.target], move, (move.target_start, move.target_row, move.target_col))
            target.copy_(source)

    def _launch(self, staying: Buffers, passing: Buffers, device: torch.device) -> None:
        from mcore_bridge.weights.transfer.triton_copy import launch, prepare

        if staying.is_aligned not in self._launches:
            self._launches[staying.is_aligned] = prepare(self.table, aligned=staying.is_aligned, device=device)
        launch(self._launches[staying.is_aligned], staying.addresses_on(device), passing.addresses_on(device))


def _words(buffer: Tensor, move: ByteCopy, place: tuple[int, int, int]) -> Tensor:
    """The elements of a move in a buffer, as whole numbers, which every copy keeps bit for bit."""
    start, row, col = (num_bytes // move.item for num_bytes in place)
    flat = buffer.detach().view(-1).view(_WORDS[move.item])
    return flat.as_strided((move.rows, move.cols), (row, col), flat.storage_offset() + start)


@contextmanager
def compiling(device: torch.device) -> Iterator[None]:
    """Compile the kernel while the block runs, where moves on ``device`` are made by one: up to a second, once."""
    if device.type != "cuda" or not _has_triton():
        yield
        return
    import mcore_bridge.weights.transfer.triton_copy  # noqa: F401  # and with it Triton, which the block may import as well

    index = torch.cuda.current_device() if device.index is None else device.index  # a thread has its own
    thread = Thread(target=_compile, args=(torch.device("cuda", index),))
    thread.start()
    try:
        yield
    finally:
        thread.join()


@cache
def _compile(device: torch.device) -> None:
    """By moves of the kinds that most exports have, for which it has tiles of two shapes."""
    with suppress(Exception), torch.cuda.device(device):  # whoever needs it is told then
        for rows in (1, 128):
            move = ByteCopy(0, 0, 1, 0, rows, WIDEST, 1, WIDEST, 1, WIDEST, 1)
            source, target = (torch.empty(move.num_bytes(), dtype=torch.uint8, device=device) for _ in range(2))
            CopyTable([move]).run(Buffers([source]), Buffers([target]), device)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
