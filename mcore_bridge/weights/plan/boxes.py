"""Copies between strided boxes of elements in two memories, and their composition: one copy after another.

A ``BoxCopy`` counts offsets and strides in elements. A kernel runs it as one or more ``ByteCopy``: ``rows`` times
``cols`` elements of ``item`` bytes. In both buffers, a ``ByteCopy`` begins at some byte, and its rows and columns have
constant distances in bytes. An engine's process imports this module, which needs numpy only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, product
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

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
    """The first element in the other memory."""
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


WIDEST = 16  # bytes that a thread of a GPU copies at once
Table = np.ndarray[tuple[int, int], np.dtype[np.int64]]
Numbers = np.ndarray[tuple[int], np.dtype[np.int64]]
Flags = np.ndarray[tuple[int], np.dtype[np.bool_]]


class ByteCopy(NamedTuple):
    """A copy from buffer ``source`` to buffer ``target``. Starts, items and distances are bytes."""

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

    @classmethod
    def of(cls, box: BoxCopy, item: int, *, source: int = 0, target: int = 0, start: int = 0) -> Iterator[ByteCopy]:
        """The copies of a box of elements of ``item`` bytes: one if it has at most two dims, else several.

        Args:
            source, target: the numbers of the two buffers.
            start: the byte of the source from which the box counts.
        """
        dims = [(size, near * item, far * item) for size, near, far in box.dims]
        if len(dims) < 2:
            run = bool(dims) and dims[0][1:] == (item, item)
            dims = [(1, 0, 0), *dims] if run else [*(dims or [(1, 0, 0)]), (1, item, item)]
        *outer, rows, cols = dims
        start, target_start = start + box.source * item, box.target * item
        for index in product(*(range(size) for size, _, _ in outer)):
            yield cls(
                *(source, start + sum(i * near for i, (_, near, _) in zip(index, outer, strict=True))),
                *(target, target_start + sum(i * far for i, (_, _, far) in zip(index, outer, strict=True))),
                *(rows[0], cols[0], item, rows[1], cols[1], rows[2], cols[2]),
            )

    def then(self, box: BoxCopy) -> Iterator[ByteCopy]:
        """The composition: this copy, followed by ``box``, which reads what this copy writes.

        Raises:
            ValueError: when the result is not a few boxes, or this function cannot decide.
        """
        item = self.item
        near, far = (self.source_row, self.source_col), (self.target_row, self.target_col)
        if any(number % item for number in (*near, *far, self.target_start)):
            raise ValueError("bytes that are no whole elements")
        strides = ([distance // item for distance in distances] for distances in (near, far))
        own = BoxCopy.of(0, (self.rows, self.cols), next(strides), self.target_start // item, next(strides))
        both = box.after(own)
        return ByteCopy.of(both, item, source=self.source, start=self.source_start) if both else iter(())

    def num_bytes(self) -> int:
        """Bytes that are copied."""
        return self.rows * self.cols * self.item

    def source_end(self) -> int:
        """The byte of the source behind the last one that is read."""
        return self.source_start + (self.rows - 1) * self.source_row + (self.cols - 1) * self.source_col + self.item

    def is_dense(self) -> bool:
        """Whether all elements are contiguous in both buffers, in the same order."""
        row = self.cols * self.item
        in_rows = self.rows == 1 or (self.source_row, self.target_row) == (row, row)
        return in_rows and (self.source_col, self.target_col) == (self.item, self.item)


def through(copies: Iterable[ByteCopy], number: int) -> tuple[list[ByteCopy], list[ByteCopy], int]:
    """Cut copies into two halves that go through one buffer. Their order does not matter.

    Args:
        copies: the copies; no stride in a source is negative.
        number: the number of the buffer.

    Returns:
        The copies into the buffer, the copies out of it, and the bytes that it needs.
    """
    copies, spans = [*copies], dict[int, tuple[int, int]]()
    for copy in copies:
        start, end = spans.get(copy.source, (copy.source_start, 0))
        spans[copy.source] = min(start, copy.source_start), max(end, copy.source_end())
    into, moved, num_bytes = [], dict[int, int](), 0
    for source, (start, end) in spans.items():
        start -= start % WIDEST
        size = end - start
        into.append(ByteCopy(source, start, number, num_bytes, 1, size, 1, size, 1, size, 1))
        moved[source] = num_bytes - start
        num_bytes += -(-size // WIDEST) * WIDEST
    out_of = [copy._replace(source=number, source_start=copy.source_start + moved[copy.source]) for copy in copies]
    return into, out_of, num_bytes


def stacked(byte_copies: Iterable[ByteCopy]) -> list[ByteCopy]:
    """Join copies of equal rows at equal distances into one copy of many rows."""
    joined: list[ByteCopy] = []
    for byte_copy in byte_copies:
        longer = _with_row(joined[-1], byte_copy) if joined else None
        joined[-1 if longer else len(joined) :] = [longer or byte_copy]
    return joined


def _with_row(joined: ByteCopy, byte_copy: ByteCopy) -> ByteCopy | None:
    """Add the single row of ``byte_copy`` below the rows of ``joined``; None if it is not the next row."""
    if byte_copy.rows != 1 or (byte_copy.cols, byte_copy.item) != (joined.cols, joined.item):
        return None
    if (byte_copy.source, byte_copy.target) != (joined.source, joined.target):
        return None
    if (byte_copy.source_col, byte_copy.target_col) != (joined.source_col, joined.target_col):
        return None
    near = (byte_copy.source_start - joined.source_start) // joined.rows
    far = (byte_copy.target_start - joined.target_start) // joined.rows
    if min(near, far) < 0 or (joined.rows > 1 and (joined.source_row, joined.target_row) != (near, far)):
        return None
    ends = (joined.source_start + near * joined.rows, joined.target_start + far * joined.rows)
    if ends != (byte_copy.source_start, byte_copy.target_start):
        return None
    return joined._replace(rows=joined.rows + 1, source_row=near, target_row=far)


class RowSize(NamedTuple):
    """The rows of the codes of one shard."""

    rows: int
    row_bytes: int
    tile_bytes: int
    """Bytes of a row that a kernel writes to one place."""


RowSizes = Mapping[int, RowSize]
"""Codes by their numbers."""
NO_ROWS: RowSizes = MappingProxyType({})


class Rows(NamedTuple):
    """The places of the rows of one shard's codes, each of which may be cut into parts of equal size."""

    tensors: Table
    """The engine's tensor of each part [rows, parts]; -1 for a part that the engine does not use."""
    starts: Table
    """The byte of this tensor at which the part begins [rows, parts]."""


def rows_of(copies: Sequence[ByteCopy], size: RowSize) -> Rows | None:
    """The places to which ``copies`` bring the rows of codes.

    Returns:
        None if a row is cut within a tile, if its bytes are not contiguous, or if a part of it is copied more than
        once. Also None if a place is no multiple of ``WIDEST``.
    """
    runs = [(copy.source_start, copy.cols * copy.item, copy.source_row if copy.rows > 1 else 0) for copy in copies]
    part = math.gcd(size.row_bytes, *chain.from_iterable(runs))
    if part == 0 or part % WIDEST or (part < size.row_bytes and part % size.tile_bytes):
        return None
    parts = size.row_bytes // part
    tensors, starts = np.full(size.rows * parts, -1, np.int64), np.zeros(size.rows * parts, np.int64)
    for copy, (start, length, distance) in zip(copies, runs, strict=True):
        run, within = np.arange(copy.rows)[:, None], np.arange(length // part)
        chosen = (start + run * distance) // part + within
        is_run = copy.cols == 1 or copy.source_col == copy.target_col == copy.item
        if not is_run or np.any(tensors[chosen] >= 0) or len(np.unique(chosen)) < chosen.size:
            return None
        tensors[chosen] = copy.target
        starts[chosen] = copy.target_start + run * copy.target_row + within * part
    if np.any(starts % WIDEST):
        return None
    return Rows(tensors.reshape(size.rows, parts), starts.reshape(size.rows, parts))


def rows_without_places(size: RowSize) -> Rows:
    """The rows of codes that an engine does not use."""
    return Rows(np.full((size.rows, 1), -1, np.int64), np.zeros((size.rows, 1), np.int64))


def bytes_read(copies: Iterable[ByteCopy], num_bytes: int) -> Flags:
    """Which bytes of their source the copies read, bool [num_bytes]."""
    read = np.zeros(num_bytes, dtype=bool)
    for copy in copies:
        starts = np.arange(copy.rows)[:, None] * copy.source_row + np.arange(copy.cols) * copy.source_col
        read[copy.source_start + starts[:, :, None] + np.arange(copy.item)] = True
    return read


def placed_rows(copies: Iterable[ByteCopy], sizes: RowSizes, first: int) -> dict[int, Rows]:
    """The places of the rows of all codes that need no copy, by the numbers of these codes.

    Args:
        first: the number of the engine's first tensor among the buffers of the copies. Places count from there.
    """
    of_codes: dict[int, list[ByteCopy]] = {number: [] for number in sizes}
    for copy in copies:
        if copy.source in of_codes:
            of_codes[copy.source].append(copy._replace(target=copy.target - first))
    rows = {number: rows_of(of_codes[number], size) for number, size in sizes.items()}
    return {number: own for number, own in rows.items() if own is not None}
