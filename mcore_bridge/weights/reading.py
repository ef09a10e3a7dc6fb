"""A slice of an HF tensor on its way into a parameter: copied at once, or read from its file by threads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mcore_bridge.weights.alignment import aligned
from mcore_bridge.weights.safetensors_file import SafetensorsFile
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
    def is_direct(self) -> bool:
        """Whether the bytes of the source can be read straight into place."""
        return self.target.is_cpu and self.target.dtype == self.source.dtype and self.target.is_contiguous()


@dataclass(frozen=True, slots=True)
class _Read:
    """A piece, the file that its source lies in, and where in a slot it arrives unless it goes straight into place."""

    slice_copy: SliceCopy
    file: SafetensorsFile
    start: int

    def arrived(self, memory: Tensor) -> Tensor:
        """The piece in the memory of a slot, or in a copy of that on a device."""
        flat = memory[self.start : self.start + self.slice_copy.source.nbytes]
        return flat.view(self.slice_copy.source.dtype).view(self.slice_copy.source.shape)


def read(slices: Iterable[tuple[SliceCopy, SafetensorsFile]], staging: Staging) -> None:
    """Have threads read the sources of ``slices`` from their files. All is in place when ``staging`` has been left."""
    for batch in _batches(slices, staging.slot_bytes):
        slot = staging.take()
        staged = [each for each in batch if not each.slice_copy.is_direct]
        work = [
            (each.file, each.slice_copy.source, each.slice_copy.target) for each in batch if each.slice_copy.is_direct
        ]
        then = None
        if staged:
            memory = slot.memory(
                staged[-1].start + staged[-1].slice_copy.source.nbytes, staged[0].slice_copy.target.device
            )
            work += [(each.file, each.slice_copy.source, each.arrived(memory)) for each in staged]
            then = partial(_put, staged, memory, slot)
        staging.submit(slot, partial(_fill, work), then)


def _batches(slices: Iterable[tuple[SliceCopy, SafetensorsFile]], num_bytes: int) -> Iterator[list[_Read]]:
    """Pieces for one device that fit into one slot: to hand small ones to a thread costs more than to read them."""
    batch: list[_Read] = []
    filled = 0
    for slice_copy, file in slices:
        for piece in slice_copy.pieces(num_bytes):
            size, device = piece.source.nbytes, piece.target.device
            if batch and (filled + size > num_bytes or device != batch[0].slice_copy.target.device):
                yield batch
                batch, filled = [], 0
            batch.append(_Read(piece, file, filled))
            filled += aligned(size)
    if batch:
        yield batch


def _fill(work: Iterable[tuple[SafetensorsFile, Tensor, Tensor]]) -> None:
    for file, source, out in work:
        file.read(source, out)


def _put(staged: Sequence[_Read], memory: Tensor, slot: Slot) -> None:
    """Take what has arrived in a slot to the device at once, and from there into place, with casts and transposes."""
    device = staged[0].slice_copy.target.device
    arrived = memory.to(device, non_blocking=True)
    for each in staged:
        SliceCopy(each.arrived(arrived), each.slice_copy.target, each.slice_copy.crossing).run()
    slot.mark(device)
