"""A slice of an HF tensor on its way into a parameter: copied at once, or read from its file by threads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mcore_bridge.weights.safetensors_file import SafetensorsFile
from mcore_bridge.weights.staging import Slot, Staging


@dataclass(frozen=True, slots=True)
class Move:
    """``source`` goes to ``target``, a view of the same shape, and crosses in the dtype ``crossing``."""

    source: Tensor
    target: Tensor
    crossing: torch.dtype

    def run(self) -> None:
        """Copy from memory."""
        self.target.copy_(self.source.to(self.crossing))

    def pieces(self, num_bytes: int) -> Iterator[Move]:
        """The move in parts of at most ``num_bytes`` (or one element), with dims in the order of the source."""
        dims = sorted(range(self.source.dim()), key=self.source.stride, reverse=True)
        yield from Move(self.source.permute(dims), self.target.permute(dims), self.crossing)._split(num_bytes)

    def _split(self, num_bytes: int) -> Iterator[Move]:
        if self.source.nbytes <= num_bytes or self.source.numel() == 1:
            yield self
            return
        dim = next(dim for dim, size in enumerate(self.source.shape) if size > 1)
        size = max(1, num_bytes * self.source.shape[dim] // self.source.nbytes)
        for source, target in zip(self.source.split(size, dim), self.target.split(size, dim), strict=True):
            yield from Move(source, target, self.crossing)._split(num_bytes)

    @property
    def is_direct(self) -> bool:
        """Whether the bytes of the source can be read straight into place."""
        return self.target.is_cpu and self.target.dtype == self.source.dtype and self.target.is_contiguous()


def read(moves: Iterable[Move], file: SafetensorsFile, staging: Staging) -> None:
    """Have threads read the sources of ``moves``, which lie in ``file``; in place when ``staging`` has been left."""
    for move in moves:
        for piece in move.pieces(staging.slot_bytes):
            slot = staging.take()
            if piece.is_direct:
                staging.submit(slot, partial(file.read, piece.source, piece.target))
                continue
            memory = slot.memory(piece.source.nbytes, piece.target.device)
            arrived = memory.view(piece.source.dtype).view(piece.source.shape)
            staging.submit(slot, partial(file.read, piece.source, arrived), partial(_put, piece, arrived, slot))


def _put(move: Move, arrived: Tensor, slot: Slot) -> None:
    """Copy what has arrived in a slot; casts and transposes are for the device."""
    device = move.target.device
    Move(arrived.to(device, non_blocking=True), move.target, move.crossing).run()
    slot.mark(device)
