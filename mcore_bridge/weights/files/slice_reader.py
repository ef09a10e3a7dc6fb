"""Copies slices of HF tensors to slices of parameters, from memory, or from files by threads.

Slices of encoded weights are read in this way, too, and are decoded on their target device (``encoded_copy.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, islice
from typing import TypeAlias

import torch
from torch import Tensor

from mcore_bridge.rules.spec import runs_within
from mcore_bridge.weights.files.encoded_copy import EncodedCopy, submit
from mcore_bridge.weights.files.positional_io import Array, array_of
from mcore_bridge.weights.files.safetensors import SafetensorsFile
from mcore_bridge.weights.files.staging import Slot, Staging

_COMPARED = 4 << 20
"""Bytes that ``FileCopy.is_in_place`` compares at once."""


@dataclass(frozen=True, slots=True)
class FileCopy:
    """A copy of ``source`` to ``target``, a view of the same shape, with a cast to ``crossing`` in between.

    Attributes:
        files: the file of the source; empty if the source is in memory.
    """

    source: Tensor
    target: Tensor
    crossing: torch.dtype
    files: tuple[SafetensorsFile, ...] = ()

    def run(self) -> None:
        """Copy from memory."""
        self.target.copy_(self.source.to(self.crossing))

    def is_in_place(self) -> bool:
        """Whether the target already holds the values of the source."""
        return all(
            torch.equal(piece.target, piece.source.to(piece.crossing).to(piece.target))
            for piece in self.pieces(_COMPARED)
        )

    def pieces(self, num_bytes: int) -> Iterator[FileCopy]:
        """Split the copy into pieces of at most ``num_bytes`` (or one element), with dims in the source's order."""
        strides = self.source.stride()
        if list(strides) == sorted(strides, reverse=True):
            yield from self._split(num_bytes)
            return
        dims = sorted(range(len(strides)), key=strides.__getitem__, reverse=True)
        yield from replace(self, source=self.source.permute(dims), target=self.target.permute(dims))._split(num_bytes)

    def _split(self, num_bytes: int) -> Iterator[FileCopy]:
        if self.source.nbytes <= num_bytes or self.source.numel() == 1:
            yield self
            return
        dim = next(dim for dim, size in enumerate(self.source.shape) if size > 1)
        size = max(1, num_bytes * self.source.shape[dim] // self.source.nbytes)
        for source, target in zip(self.source.split(size, dim), self.target.split(size, dim), strict=True):
            yield from FileCopy(source, target, self.crossing, self.files)._split(num_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes to read."""
        return self.source.nbytes

    @property
    def kind(self) -> tuple[object, ...]:
        """A key that is equal for slices which one batch can hold."""
        return self.source.dtype, self.crossing, self.target.dtype, self.target.device, self.is_direct

    @property
    def is_direct(self) -> bool:
        """Whether the bytes of the source can be read straight into the target."""
        return self.target.is_cpu and self.target.dtype == self.source.dtype and self.target.is_contiguous()


AnyCopy: TypeAlias = FileCopy | EncodedCopy
_Batch: TypeAlias = tuple[SafetensorsFile, list[AnyCopy]]
"""Pieces of a file that fit into one slot. They have one dtype and one device, so that one tensor can hold them."""
AHEAD = 64
"""How many batches are planned before threads read them, because threads need the GIL between two reads."""


def read(slices: Iterable[AnyCopy], staging: Staging) -> None:
    """Let threads read the sources of ``slices`` from their files. All targets are filled when ``staging`` exits."""
    batches = _batches(slices, staging.slot_bytes)
    while portion := list(islice(batches, AHEAD)):
        for file, pieces in portion:
            if encoded := [piece for piece in pieces if isinstance(piece, EncodedCopy)]:
                submit(encoded, staging)
            else:
                _submit(file, [piece for piece in pieces if isinstance(piece, FileCopy)], staging)


def _submit(file: SafetensorsFile, pieces: Sequence[FileCopy], staging: Staging) -> None:
    slot = staging.take()
    first, sources = pieces[0], [piece.source for piece in pieces]
    if first.is_direct:
        staging.submit(slot, partial(_fill, file, sources, [array_of(piece.target) for piece in pieces]))
        return
    memory = slot.memory(sum(source.nbytes for source in sources), first.target.device).view(first.source.dtype)
    staging.submit(slot, partial(file.read, sources, array_of(memory)), partial(_put, pieces, memory, slot))


def _batches(slices: Iterable[AnyCopy], num_bytes: int) -> Iterator[_Batch]:
    """Join small pieces into batches: to hand a small piece to a thread costs more than to read it."""
    pieces = (piece for slice_copy in slices for piece in slice_copy.pieces(num_bytes))
    for (file, *_), alike in groupby(pieces, lambda piece: (piece.files[0], *piece.kind)):
        for batch in runs_within(alike, lambda piece: piece.num_bytes, num_bytes):
            yield file, batch


def _fill(file: SafetensorsFile, sources: Sequence[Tensor], targets: Sequence[Array]) -> None:
    for source, target in zip(sources, targets, strict=True):
        file.read([source], target)


def _put(pieces: Sequence[FileCopy], memory: Tensor, slot: Slot) -> None:
    """Copy the memory of a slot to the device at once, and from there to the targets, with casts and transposes."""
    targets = [piece.target for piece in pieces]
    arrived = memory.to(targets[0].device, non_blocking=True).to(pieces[0].crossing)
    parts = arrived.split([target.numel() for target in targets])
    torch._foreach_copy_(targets, [part.view(target.shape) for part, target in zip(parts, targets, strict=True)])
    slot.mark(targets[0].device)
