"""Copies slices of encoded weights into parameters: reads codes and scales, and decodes them on the target's device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mcore_bridge.rules.encoded import EncodedSlice
from mcore_bridge.weights.files.positional_io import array_of
from mcore_bridge.weights.files.safetensors import SafetensorsFile
from mcore_bridge.weights.files.staging import Slot, Staging

_ALIGNMENT = 8
_COMPARED = 1 << 20
"""The number of elements to decode and compare at once."""
_SCRATCH = 8
"""Bytes of a slot per element that is decoded on a CPU at once. Temporary tensors need as many bytes again."""


@dataclass(frozen=True, slots=True)
class EncodedCopy:
    """Decodes ``source`` into ``target``, a view with the dims of the codes.

    Attributes:
        files: the file of each part of the weight; empty if the parts are in memory.
    """

    source: EncodedSlice
    target: Tensor
    files: tuple[SafetensorsFile, ...] = ()

    @classmethod
    def of(cls, source: EncodedSlice, target: Tensor, files: tuple[SafetensorsFile, ...] = ()) -> EncodedCopy:
        """A copy into ``target``, which has the dims of the slice."""
        return cls(source, source.arranged(target), files)

    def run(self) -> None:
        """Decode from memory into the target."""
        for source, target in self.source.pieces(self.target, _COMPARED):
            source.put(target)

    def is_in_place(self) -> bool:
        """Whether the target already holds the decoded values."""
        for source, target in self.source.pieces(self.target, _COMPARED):
            held = torch.empty_like(target)
            source.put(held)
            if not torch.equal(held, target):
                return False
        return True

    def pieces(self, num_bytes: int) -> Iterator[EncodedCopy]:
        """Split into smaller copies that read at most ``num_bytes``; on a CPU, less."""
        num_elements = (
            num_bytes // _SCRATCH if self.target.is_cpu else num_bytes * self.source.weight.codec.per_byte // 2
        )
        for source, target in self.source.pieces(self.target, max(1, num_elements)):
            yield EncodedCopy(source, target, self.files)

    @property
    def num_bytes(self) -> int:
        """Bytes that this copy takes in a slot: for the parts that it reads and, for a target on CPU, for decoding."""
        return sum(part.nbytes for part in self.source.parts) + (
            self.target.numel() * _SCRATCH if self.target.is_cpu else 0
        )

    @property
    def kind(self) -> tuple[object, ...]:
        """A key that is equal for copies that can share a slot."""
        dtypes = tuple(part.dtype for part in self.source.weight.parts)
        return self.source.weight.codec, dtypes, self.target.dtype, self.target.device, tuple(map(id, self.files))


def submit(copies: Sequence[EncodedCopy], staging: Staging) -> None:
    """Let a thread read the parts for these copies into one slot, and decode them afterwards."""
    slot, groups = staging.take(), _alike(copies)
    views = list(zip(*(copy.source.parts for group in groups for copy in group), strict=True))
    places = _lay_out(views)
    memory = slot.memory(places[-1], copies[0].target.device)
    read = partial(_read, copies[0].files, views, places, memory)
    staging.submit(slot, read, partial(_put, groups, places, memory, slot))


def _alike(copies: Sequence[EncodedCopy]) -> list[list[EncodedCopy]]:
    """Group copies that can be decoded together."""
    groups: dict[object, list[EncodedCopy]] = {}
    for copy in copies:
        groups.setdefault(copy.source.geometry, []).append(copy)
    return list(groups.values())


def _lay_out(parts: Sequence[Sequence[Tensor]]) -> list[int]:
    """The offsets of parts in a slot: the codes of all copies, then all scales, and so on, and at last the end."""
    places = [0]
    for views in parts:
        size = sum(view.nbytes for view in views)
        places.append(places[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
    return places


def _read(
    files: Sequence[SafetensorsFile], parts: Sequence[Sequence[Tensor]], places: Sequence[int], memory: Tensor
) -> None:
    for views, start, file in zip(parts, places, files, strict=False):
        size = sum(view.nbytes for view in views)
        file.read(views, array_of(memory[start : start + size].view(views[0].dtype)))


def _put(groups: Sequence[Sequence[EncodedCopy]], places: Sequence[int], memory: Tensor, slot: Slot) -> None:
    """Copy the whole slot to the device, and decode slices of equal geometry together."""
    device, starts = groups[0][0].target.device, [*places]
    arrived = memory.to(device, non_blocking=True)
    for group in groups:
        parts = []
        for number, view in enumerate(group[0].source.parts):
            stop = starts[number] + view.nbytes * len(group)
            part = arrived[starts[number] : stop].view(view.dtype).view(len(group), *view.shape)
            parts.append(part)
            starts[number] = stop
        values = group[0].source.decode(tuple(parts), group[0].target.dtype)
        torch._foreach_copy_([copy.target for copy in group], list(values.unbind()))
    slot.mark(device)
