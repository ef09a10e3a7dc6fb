"""Copies between strided boxes of elements in two memories, and their composition: one copy after another.

Offsets and strides count elements. This module needs only the standard library.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Dim(NamedTuple):
    """One dim of a copy: the number of elements, and their strides in source and target."""

    size: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class BoxCopy:
    """A copy of elements of one memory, the source, to places in another, the target.

    >>> BoxCopy.of(0, (2, 3), (3, 1), 10, (3, 1))       # two rows of three, dense on both sides
    BoxCopy(source=0, target=10, dims=(Dim(size=6, source=1, target=1),))
    """

    source: int
    """The first element, counted from the beginning of the memory."""
    target: int
    dims: tuple[Dim, ...]
    """The outermost in the target first; neighbours that could be one dim are joined."""

    @classmethod
    def of(
        cls,
        source: int,
        sizes: Sequence[int],
        source_strides: Sequence[int],
        target: int,
        target_strides: Sequence[int],
    ) -> BoxCopy:
        """The copy between two strided views of one shape."""
        return cls(source, target, merged(map(Dim, sizes, source_strides, target_strides)))

    @classmethod
    def place_of(cls, tensor: Tensor) -> BoxCopy:
        """The elements of a tensor in its storage, as a copy of one element into all of them."""
        return cls.of(0, tensor.shape, (0,) * tensor.dim(), int(tensor.storage_offset()), tensor.stride())

    def source_in(self, memory: Tensor) -> Tensor:
        """The elements that it reads, as a view of a memory [elements]."""
        return self._view(memory, self.source, [dim.source for dim in self.dims])

    def target_in(self, memory: Tensor) -> Tensor:
        """The elements that it writes, as a view of a memory [elements]."""
        return self._view(memory, self.target, [dim.target for dim in self.dims])

    def _view(self, memory: Tensor, start: int, strides: Sequence[int]) -> Tensor:
        return memory.as_strided([dim.size for dim in self.dims], strides, memory.storage_offset() + start)

    @property
    def num_elements(self) -> int:
        """Elements that are copied."""
        return math.prod(dim.size for dim in self.dims)

    @property
    def target_end(self) -> int:
        """The index after the last element in the target."""
        return self.target + 1 + sum((dim.size - 1) * dim.target for dim in self.dims) if self.num_elements else 0

    @property
    def source_end(self) -> int:
        """The index after the last element in the source."""
        return self.source + 1 + sum((dim.size - 1) * dim.source for dim in self.dims) if self.num_elements else 0

    def is_within(self, source: int, target: int) -> bool:
        """Whether the copy stays within memories of these sizes. In a damaged map sizes may be negative, too."""
        if any(dim.size < 0 or dim.target < 0 for dim in self.dims):
            return False
        return not self.num_elements or all(
            first + sum((dim.size - 1) * min(0, dim[side]) for dim in self.dims) >= 0
            and first + sum((dim.size - 1) * max(0, dim[side]) for dim in self.dims) < size
            for first, side, size in ((self.source, 1, source), (self.target, 2, target))
        )

    def after(self, first: BoxCopy) -> BoxCopy | None:
        """The composition: ``first``, and then this copy, which reads the memory that ``first`` writes.

        Returns:
            A copy of the elements that pass through both; None if there are none.

        Raises:
            ValueError: when the composition is no box, or when this function cannot decide.
        """
        between = [*(dim.target for dim in first.dims), *(dim.source for dim in self.dims)]
        radices = _radices(between)
        near = _digits(first.target, [(dim.size, dim.target, dim.source) for dim in first.dims], radices)
        steady = [dim for dim in self.dims if not dim.source]  # one element that goes to several places
        far = _digits(self.source, [(dim.size, dim.source, dim.target) for dim in self.dims if dim.source], radices)
        source, target, dims = first.source, self.target, [Dim(dim.size, 0, dim.target) for dim in steady]
        for one, other in zip(near, far, strict=True):
            low, high = max(one.low, other.low), min(one.low + one.size, other.low + other.size)
            if low >= high:
                return None
            source += (low - one.low) * one.step
            target += (low - other.low) * other.step
            dims.append(Dim(high - low, one.step, other.step))
        return BoxCopy(source, target, merged(dims))


def are_apart(boxes: Iterable[BoxCopy]) -> bool:
    """Whether the targets of copies lie behind one another, so that no two write the same element.

    If they alternate, the result is False although no element is written twice.
    """
    ends = sorted((box.target, box.target_end) for box in boxes)
    return all(before[1] <= after[0] for before, after in pairwise(ends))


def merged(dims: Iterable[Dim]) -> tuple[Dim, ...]:
    """The dims sorted by their strides in the target; neighbours that are one run on both sides are joined."""
    outermost_first = sorted(dims, key=lambda dim: (-dim.target, -dim.source))
    return joined(outermost_first)


def joined(dims: Iterable[tuple[int, int, int]]) -> tuple[Dim, ...]:
    """The dims in their order; neighbours that are one run on both sides are joined."""
    runs: list[Dim] = []
    for size, source, target in dims:
        if runs and runs[-1][1:] == (size * source, size * target):
            runs[-1] = Dim(runs[-1].size * size, source, target)
        elif size != 1:
            runs.append(Dim(size, source, target))
    return tuple(runs)


class _Digit(NamedTuple):
    """A range of one digit of an address, and the stride of this digit in the other memory."""

    low: int
    size: int
    step: int


def _radices(strides: Iterable[int]) -> list[int]:
    """The values of the digits in which addresses are written, the largest first."""
    radices = sorted({1, *(stride for stride in strides if stride)})
    if any(large % small for small, large in pairwise(radices)):
        raise ValueError(f"strides {radices} do not divide one another")
    return radices[::-1]


def _digits(start: int, dims: Sequence[tuple[int, int, int]], radices: Sequence[int]) -> list[_Digit]:
    """The addresses of a box as one range for each digit. A dim that exceeds its digit uses the next one, too."""
    spans: dict[int, tuple[int, int]] = {}
    for size, stride, step in dims:
        place = radices.index(stride)
        while size > 1:
            limit = radices[place - 1] // radices[place] if place else size
            taken = min(size, limit)
            if size % taken or radices[place] in spans:
                raise ValueError("a dim ends within a digit, or two share one")
            spans[radices[place]] = (taken, step)
            size, step, place = size // taken, step * taken, place - 1
    digits = []
    for place, radix in enumerate(radices):
        low, start = divmod(start, radix)
        size, step = spans.get(radix, (1, 0))
        if place and low + size > radices[place - 1] // radix:
            raise ValueError("a range of a digit goes into the next")
        digits.append(_Digit(low, size, step))
    return digits
