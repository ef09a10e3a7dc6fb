"""A weight that a file holds encoded, and slices of it, which are decoded without the rest.

Codes and scales of a weight are *grids*: tensors in which one element stands for a cell of the weight. Coordinates say
which cells a slice needs: tensors of the weight's shape that hold the numbers of rows and of columns. They are sent
through the functions that cut the weight, so no second arithmetic says where a scale belongs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from mcore_bridge.errors import CheckpointError
from mcore_bridge.rules.codec import Codec, decoded, numbers_of, scales_of

Shape = tuple[int, ...]
_PIECE_ELEMENTS = 1 << 20
"""Elements that are decoded at once where memory holds a whole weight."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """One weight, as a checkpoint of plain numbers would have it, and what a file has in its place.

    Attributes:
        name: of the plain tensor.
        codec: how numbers are encoded.
        shape: of the plain tensor.
        order: which of its dims each dim of the codes is; a transposed weight has others than 0, 1, ...
        codes: uint8, in this order, the last dim in bytes.
        scales: one for each block, in this order.
        overall: one further number, [1], if the codec has one.
    """

    name: str
    codec: Codec
    shape: Shape
    order: tuple[int, ...]
    codes: Tensor
    scales: Tensor
    overall: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the plain tensor, as publishers have it; any other can be asked for."""
        return torch.bfloat16

    @property
    def nbytes(self) -> int:
        """Bytes of the plain tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The tensors of which it consists: codes, scales, and the number for all, if there is one."""
        return (self.codes, self.scales) if self.overall is None else (self.codes, self.scales, self.overall)

    def cut(self, cutting: Callable[[Tensor], Tensor] = lambda whole: whole) -> EncodedSlice:
        """The slice that ``cutting`` takes of the plain tensor."""
        axes: list[int | None] = [None] * len(self.shape)
        ranges = [range(0)] * len(self.shape)
        num_dims = 0
        for dim, numbers in enumerate(coordinates(self.shape)):
            taken = cutting(numbers)
            num_dims = taken.dim()
            ranges[dim], axes[dim] = _run(taken)
        return EncodedSlice(
            self, tuple(ranges[dim] for dim in self.order), tuple(axes[d] for d in self.order), num_dims
        )

    def __getitem__(self, index: int | slice) -> EncodedSlice:
        return self.cut(lambda whole: whole[index])

    def to(self, dtype: torch.dtype) -> Tensor:
        """All of it, decoded piece by piece."""
        return self.cut().to(dtype)

    def is_floating_point(self) -> bool:
        """As every weight is."""
        return True


@dataclass(frozen=True, slots=True)
class EncodedSlice:
    """Some rows and columns of an encoded weight: along each dim of the codes, ``ranges`` of the weight's coordinates.

    Attributes:
        axes: which dim of the slice each dim of the codes is; None is a dim that the slice lacks, or has as one of 1.
        num_dims: of the slice.
    """

    weight: Encoded
    ranges: tuple[range, ...]
    axes: tuple[int | None, ...]
    num_dims: int

    @property
    def shape(self) -> Shape:
        """In the order of the codes."""
        return tuple(map(len, self.ranges))

    @property
    def nbytes(self) -> int:
        """Bytes of its parts."""
        return sum(part.nbytes for part in self.parts)

    def arranged(self, plain: Tensor) -> Tensor:
        """A tensor of the slice, as a view with the dims of the codes."""
        own = [axis for axis in self.axes if axis is not None]
        rest = [dim for dim in range(self.num_dims) if dim not in own]
        view = plain.permute(*own, *rest)
        for _ in rest:
            view = view.squeeze(-1)
        for dim, axis in enumerate(self.axes):
            if axis is None:
                view = view.unsqueeze(dim)
        return view

    def pieces(self, plain: Tensor, num_elements: int) -> Iterator[tuple[EncodedSlice, Tensor]]:
        """The same in parts of at most ``num_elements``, each with its part of ``plain``.

        ``plain`` and its parts are as ``arranged`` makes them, and each part can be taken for a slice of its own.
        """
        if math.prod(self.shape) <= num_elements:
            yield self, plain
            return
        dim = next(dim for dim, size in enumerate(self.shape) if size > 1)
        size = max(1, num_elements * self.shape[dim] // math.prod(self.shape))
        for start in range(0, self.shape[dim], size):
            ranges = (*self.ranges[:dim], self.ranges[dim][start : start + size], *self.ranges[dim + 1 :])
            part = plain.narrow(dim, start, len(ranges[dim]))
            yield from EncodedSlice(self.weight, ranges, self.axes, self.num_dims).pieces(part, num_elements)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """What is needed of each part of the weight, as views."""
        codes, scales = self._cells
        covered = self.weight.codes[tuple(map(_covering, self.ranges, codes))]
        return (covered, self.weight.scales[tuple(map(_covering, self.ranges, scales))], *self.weight.parts[2:])

    @property
    def _cells(self) -> tuple[Shape, Shape]:
        """How many coordinates an element of the codes, and one of the scales, stands for along each dim."""
        return (*(1 for _ in self.ranges[1:]), self.weight.codec.per_byte), self.weight.codec.block

    @property
    def geometry(self) -> tuple[object, ...]:
        """Equal for slices whose parts are alike in shape, and are decoded by the same indices."""
        cells = map(math.lcm, *self._cells)
        return self.weight.codec, *(
            (r.start % cell, len(r), r.step) for r, cell in zip(self.ranges, cells, strict=True)
        )

    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """The numbers of ``n`` slices of one ``geometry``: [n, *shape].

        Args:
            parts: for each of ``self.parts``, those of all slices, with a leading dim of ``n``, on any device.
        """
        codec = self.weight.codec
        numbers = numbers_of(codec, parts[0])
        overall = parts[2].view(-1, *(1 for _ in self.ranges)).float() if len(parts) > 2 else None
        scales = scales_of(codec, parts[1], overall)
        for dim, (run, block) in enumerate(zip(self.ranges, codec.block, strict=True), 1):
            scales = _spread(scales, dim, run, block)
        return decoded(codec, _within(numbers, self.ranges[-1], codec.per_byte), scales, dtype)

    def to(self, dtype: torch.dtype) -> Tensor:
        """All of it, decoded piece by piece, with its own dims."""
        axes = sorted((axis, dim) for dim, axis in enumerate(self.axes) if axis is not None)
        sizes = dict.fromkeys(range(self.num_dims), 1) | {axis: self.shape[dim] for axis, dim in axes}
        plain = torch.empty([sizes[dim] for dim in range(self.num_dims)], dtype=dtype)
        for piece, part in self.pieces(self.arranged(plain), _PIECE_ELEMENTS):
            piece.put(part)
        return plain

    def put(self, plain: Tensor) -> None:
        """Decode it from memory into ``plain``, a tensor as ``arranged`` makes it, where that is."""
        parts = tuple(part.unsqueeze(0).to(plain.device) for part in self.parts)
        plain.copy_(self.decode(parts, plain.dtype)[0])


@lru_cache(maxsize=256)
def coordinates(shape: Shape) -> tuple[Tensor, ...]:
    """For each dim of a tensor its numbers, as tensors of the same shape: views that take no memory."""
    views = ([-1 if dim == other else 1 for other in range(len(shape))] for dim in range(len(shape)))
    return tuple(torch.arange(size).view(view).expand(shape) for size, view in zip(shape, views, strict=True))


def _run(numbers: Tensor) -> tuple[range, int | None]:
    """The coordinates along one dim that a slice has, and along which of its own dims they run."""
    axes = [dim for dim, size in enumerate(numbers.shape) if size > 1 and numbers.stride(dim)]
    first = int(numbers[(0,) * numbers.dim()])
    if not axes:
        return range(first, first + 1), None
    (axis,) = axes
    line = numbers[tuple(slice(None) if dim == axis else 0 for dim in range(numbers.dim()))]
    step = int(line[1]) - first
    run = range(first, first + step * len(line), step)
    if step < 1 or int(line[-1]) != run[-1]:
        raise CheckpointError(f"a slice takes coordinates {line[:8].tolist()}...: only even steps can be decoded")
    return run, axis


def _covering(run: range, cell: int) -> slice:
    """The elements of a grid whose cells have all coordinates of a run."""
    if cell == 1:
        return slice(run.start, run[-1] + 1, run.step)
    return slice(run.start // cell, run[-1] // cell + 1)


def _within(numbers: Tensor, run: range, per_byte: int) -> Tensor:
    """Of the numbers in the bytes that cover a run along the last dim, those of the run."""
    if per_byte == 1:
        return numbers
    start = run.start % per_byte
    return numbers[..., start : start + run[-1] - run.start + 1 : run.step]


def _spread(scales: Tensor, dim: int, run: range, block: int) -> Tensor:
    """The scales of the blocks that cover a run along ``dim``, one for each coordinate; or one that is for all."""
    if block == 1 or scales.shape[dim] == 1:
        return scales
    return scales.index_select(dim, _places(run.start % block, len(run), run.step, block, scales.device))


@lru_cache(maxsize=64)
def _places(start: int, size: int, step: int, block: int, device: torch.device) -> Tensor:
    """In which block, counted from the first one of a run, each of its coordinates is."""
    return (torch.arange(size, device=device) * step + start) // block
