"""The pieces of HF tensors in a memory, computed from all writes into it. Copies of copies are composed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from mcore_bridge.weights.plan.boxes import BoxCopy


class Piece(NamedTuple):
    """A part of a memory: copied from an HF tensor, a constant, or computed from HF tensors."""

    box: BoxCopy
    hf: str | None = None
    bits: int | None = None
    casts: bool = False
    names: frozenset[str] = frozenset()
    """The names of the HF tensors from which it was computed or copied."""

    @property
    def is_computed(self) -> bool:
        """Whether it is neither a copy nor a constant."""
        return self.hf is None and self.bits is None


@dataclass
class TracedStorage:
    """One storage: either an HF tensor, or memory with its writes in order."""

    hf: str | None = None
    writes: list[Write] = field(default_factory=list)
    names: frozenset[str] = frozenset()


class Write(NamedTuple):
    """A write into a memory, in elements of ``item`` bytes.

    It is a copy of ``origin`` after the first ``num_writes`` writes of that, or a constant ``bits``, or computed.
    """

    box: BoxCopy
    item: int
    origin: TracedStorage | None = None
    num_writes: int = 0
    origin_item: int = 0
    bits: int | None = None
    casts: bool = False
    names: frozenset[str] = frozenset()


def pieces_of(memory: TracedStorage, num_writes: int, item: int) -> Iterator[Piece]:
    """The pieces of ``memory`` after its first ``num_writes`` writes, in elements of ``item`` bytes."""
    for write in memory.writes[:num_writes]:
        if write.item != item:
            yield Piece(_everywhere(write.box, write.item, item), names=memory.names)
        elif write.origin is None:
            yield Piece(write.box, bits=write.bits, names=write.names)
        elif write.origin.hf is not None:
            yield Piece(write.box, write.origin.hf, casts=write.casts, names=write.origin.names)
        else:
            yield Piece(write.box, names=write.origin.names)  # elements of the origin without a write count as computed
            yield from _through(write, write.origin)


def _through(write: Write, origin: TracedStorage) -> Iterator[Piece]:
    """The pieces of ``origin`` at the time when ``write`` read it."""
    end = write.box.source_end
    for piece in pieces_of(origin, write.num_writes, write.origin_item):
        if piece.box.target >= end or piece.box.target_end <= write.box.source:
            continue  # a storage may have several of the engine's tensors
        try:
            box = write.box.after(piece.box)
        except ValueError:
            yield Piece(write.box, names=piece.names)
            continue
        if box is not None:
            bits = None if write.casts else piece.bits
            yield piece._replace(box=box, casts=piece.casts or write.casts, bits=bits)


def _everywhere(box: BoxCopy, item: int, other: int) -> BoxCopy:
    """All elements of ``other`` bytes that a box of ``item`` bytes may touch."""
    start, end = box.target * item // other, -(-box.target_end * item // other)
    return BoxCopy.of(0, (end - start,), (0,), start, (1,))
