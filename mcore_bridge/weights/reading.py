"""A slice of an HF tensor on its way into a parameter: copied at once, or read from its file by threads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from mcore_bridge.weights.disk import Array
from mcore_bridge.weights.safetensors_file import SafetensorsFile, array_of
from mcore_bridge.weights.staging import Slot, Staging


@dataclass(frozen=True, slots=True)
class SliceCopy:
    """``source`` goes to ``target``, a view of the same shape, and crosses in the dtype ``crossing``."""

    source: Tensor
    target: Tensor
    crossing: torch.dtype

    def run(self) -> None:
        """Copy from memory."""
        self.target.copy_(self.source.to(self.crossing))

    def pieces(self, num_bytes: int) -> Iterator[SliceCopy]:
        """The same in parts of at most ``num_bytes`` (or one element), with dims in the order of the source."""
        strides = self.source.stride()
        if list(strides) == sorted(strides, reverse=True):
            yield from self._split(num_bytes)
            return
        dims = sorted(range(len(strides)), key=strides.__getitem__, reverse=True)
        yield from SliceCopy(self.source.permute(dims), self.target.permute(dims), self.crossing)._split(num_bytes)

    def _split(self, num_bytes: int) -> Iterator[SliceCopy]:
        if self.source.nbytes <= num_bytes or self.source.numel() == 1:
            yield self
            return
        dim = next(dim for dim, size in enumerate(self.source.shape) if size > 1)
        size = max(1, num_bytes * self.source.shape[dim] // self.source.nbytes)
        for source, target in zip(self.source.split(size, dim), self.target.split(size, dim), strict=True):
            yield from SliceCopy(source, target, self.crossing)._split(num_bytes)

    @property
    def kind(self) -> tuple[object, ...]:
        """What is equal for slices that can go together."""
        return self.source.dtype, self.crossing, self.target.dtype, self.target.device, self.is_direct

    @property
    def is_direct(self) -> bool:
        """Whether the bytes of the source can be read straight into place."""
        return self.target.is_cpu and self.target.dtype == self.source.dtype and self.target.is_contiguous()


_Batch: TypeAlias = list[tuple[SliceCopy, SafetensorsFile]]
"""Pieces that fit into one slot: of one dtype, for one device, so that together they are one tensor on their way."""
AHEAD = 64
"""Batches that are worked out before threads begin to read them: these need Python's lock between two reads."""


def read(slices: Iterable[tuple[SliceCopy, SafetensorsFile]], staging: Staging) -> None:
    """Have threads read the sources of ``slices`` from their files. All is in place when ``staging`` has been left."""
    batches = _batches(slices, staging.slot_bytes)
    while portion := list(islice(batches, AHEAD)):
        for batch in portion:
            _submit(batch, staging)


def _submit(batch: _Batch, staging: Staging) -> None:
    slot = staging.take()
    first, sizes = batch[0][0], [piece.source.numel() for piece, _ in batch]
    if first.is_direct:
        staging.submit(slot, partial(_fill, batch, [array_of(piece.target) for piece, _ in batch]))
        return
    memory = slot.memory(sum(sizes) * first.source.itemsize, first.target.device).view(first.source.dtype)
    places = np.split(array_of(memory), list(accumulate(sizes))[:-1])
    staging.submit(slot, partial(_fill, batch, places), partial(_put, batch, memory, slot))


def _batches(slices: Iterable[tuple[SliceCopy, SafetensorsFile]], num_bytes: int) -> Iterator[_Batch]:
    """To hand small pieces to a thread costs more than to read them."""
    batch: _Batch = []
    filled = 0
    for slice_copy, file in slices:
        for piece in slice_copy.pieces(num_bytes):
            if batch and (filled + piece.source.nbytes > num_bytes or piece.kind != batch[0][0].kind):
                yield batch
                batch, filled = [], 0
            batch.append((piece, file))
            filled += piece.source.nbytes
    if batch:
        yield batch


def _fill(batch: _Batch, places: Sequence[Array]) -> None:
    for (piece, file), place in zip(batch, places, strict=True):
        file.read(piece.source, place)


def _put(batch: _Batch, memory: Tensor, slot: Slot) -> None:
    """Take what has arrived in a slot to the device at once, and from there into place, with casts and transposes."""
    targets = [piece.target for piece, _ in batch]
    arrived = memory.to(targets[0].device, non_blocking=True).to(batch[0][0].crossing)
    parts = arrived.split([target.numel() for target in targets])
    torch._foreach_copy_(targets, [part.view(target.shape) for part, target in zip(parts, targets, strict=True)])
    slot.mark(targets[0].device)
