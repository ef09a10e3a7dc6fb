"""An encoded weight of a file, of which any slice can be decoded alone.

Codes and scales of a weight are *grids*: tensors in which one element stands for a cell of the weight. Coordinates show
which cells a slice needs: tensors of the weight's shape with the index of each row and column. The functions that cut
the weight also cut the coordinates, so no second formula for scales is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import itemgetter
from typing import TypeAlias

import torch
from torch import Tensor

from mcore_bridge.errors import CheckpointError
from mcore_bridge.rules.codec import Codec, decoded, numbers_of, scales_of

Shape = tuple[int, ...]
_PIECE_ELEMENTS = 1 << 20
"""The number of elements to decode at once, if memory holds a whole weight."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """One weight: its plain name and shape, and the tensors that a file has instead.

    Attributes:
        name: the name of the plain tensor.
        codec: how numbers are encoded.
        shape: the shape of the plain tensor.
        order: for each dim of the codes, the dim of the plain tensor; not 0, 1, ... for a transposed weight.
        codes: uint8, with dims in this order; the last dim counts bytes.
        scales: one per block, with dims in this order.
        overall: a single number for the whole weight, [1], if the codec has one.
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
        """The dtype of the plain tensor in unquantized releases. It can be decoded to any other dtype."""
        return torch.bfloat16

    @property
    def nbytes(self) -> int:
        """The size of the plain tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Its tensors: codes, scales, and the overall number if there is one."""
        return (self.codes, self.scales) if self.overall is None else (self.codes, self.scales, self.overall)

    def cut(self, cutting: Callable[[Tensor], Tensor] = lambda whole: whole) -> EncodedSlice:
        """The slice of the plain tensor that the function ``cutting`` takes."""
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

    def in_order(self, num_elements: int, prefix: tuple[int, ...] = ()) -> Iterator[EncodedSlice]:
        """Yields slices of at most ``num_elements`` (or one row), in the order of the elements of the plain tensor.

        With ``prefix``, only those within this index of the first dims.
        """
        size, inner = self.shape[len(prefix)], math.prod(self.shape[len(prefix) + 1 :])
        if inner > num_elements and len(prefix) + 2 < len(self.shape):
            for index in range(size):
                yield from self.in_order(num_elements, (*prefix, index))
            return
        step = max(1, num_elements // inner)
        for start in range(0, size, step):
            yield self.cut(itemgetter((*prefix, slice(start, start + step))))

    def to(self, dtype: torch.dtype) -> Tensor:
        """Decodes the whole weight, piece by piece."""
        return self.cut().to(dtype)

    def is_floating_point(self) -> bool:
        """True, as for every weight."""
        return True


Weight: TypeAlias = Tensor | Encoded
"""An HF tensor: plain, or to be decoded."""


@dataclass(frozen=True)
class EncodedSlice:
    """Some rows and columns of an encoded weight.

    Attributes:
        weight: the whole weight.
        ranges: for each dim of the codes, the coordinates of the weight that the slice has.
        axes: for each dim of the codes, the dim of the slice. None: the slice does not have this dim, or it has size 1.
        num_dims: the number of dims of the slice.
    """

    weight: Encoded
    ranges: tuple[range, ...]
    axes: tuple[int | None, ...]
    num_dims: int

    def of(self, weight: Encoded) -> EncodedSlice:
        """This slice of another weight with equal shape and order of dims."""
        return EncodedSlice(weight, self.ranges, self.axes, self.num_dims)

    @property
    def shape(self) -> Shape:
        """The shape of the slice, with dims in the order of the codes."""
        return tuple(map(len, self.ranges))

    @property
    def nbytes(self) -> int:
        """The number of bytes of its parts."""
        return sum(part.nbytes for part in self.parts)

    def arranged(self, plain: Tensor) -> Tensor:
        """View ``plain``, which has the dims of the slice, with the dims of the codes."""
        if self.axes == tuple(range(self.num_dims)):  # the usual case
            return plain
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
        """Smaller slices with at most ``num_elements``, each with its part of ``plain``.

        ``plain`` and its parts have the dims of the codes, as from ``arranged``.
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

    @cached_property
    def parts(self) -> tuple[Tensor, ...]:
        """Views of codes, scales and overall number, with only the elements that the slice needs."""
        (codes, scales), weight = _indices(self.weight.codec, self.ranges), self.weight
        return (weight.codes[codes], weight.scales[scales], *weight.parts[2:])

    @property
    def geometry(self) -> tuple[object, ...]:
        """A key that is equal for slices that can be decoded together: of one codec, with parts of equal shapes."""
        return _geometry(self.weight.codec, self.ranges)

    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """Decodes ``n`` slices with the same ``geometry``: [n, *shape].

        Args:
            parts: for each of ``self.parts``, the parts of all slices, stacked along a first dim of ``n``.
            dtype: the dtype of the result.
        """
        codec = self.weight.codec
        numbers = numbers_of(codec, parts[0])
        overall = parts[2].view(-1, *(1 for _ in self.ranges)).float() if len(parts) > 2 else None
        scales = scales_of(codec, parts[1], overall)
        numbers = _within(numbers, self.ranges[-1], codec.per_byte)
        sizes, cells = [len(numbers)], [len(scales)]
        for dim, (run, block) in enumerate(zip(self.ranges, codec.block, strict=True), 1):
            if scales.shape[dim] > 1 and _fills(run, block):  # whole blocks: a dim of blocks, and one within a block
                sizes += [scales.shape[dim], block]
                cells += [scales.shape[dim], 1]
                continue
            scales = _spread(scales, dim, run, block)
            sizes.append(len(run))
            cells.append(scales.shape[dim])
        return decoded(codec, numbers.reshape(sizes), scales.view(cells), dtype).view(numbers.shape)

    def to(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """Decodes the slice on a device, piece by piece; the result has the dims of the slice."""
        axes = sorted((axis, dim) for dim, axis in enumerate(self.axes) if axis is not None)
        sizes = dict.fromkeys(range(self.num_dims), 1) | {axis: self.shape[dim] for axis, dim in axes}
        plain = torch.empty([sizes[dim] for dim in range(self.num_dims)], dtype=dtype, device=device)
        for piece, part in self.pieces(self.arranged(plain), _PIECE_ELEMENTS):
            piece.put(part)
        return plain

    def put(self, plain: Tensor) -> None:
        """Decodes the slice from memory into ``plain``, which has the dims of the codes, on the device of ``plain``."""
        parts = tuple(part.unsqueeze(0).to(plain.device) for part in self.parts)
        plain.copy_(self.decode(parts, plain.dtype)[0])


@lru_cache(maxsize=256)
def coordinates(shape: Shape) -> tuple[Tensor, ...]:
    """For each dim of a tensor, the coordinates along it, as tensors of the same shape. These views need no memory."""
    views = ([-1 if dim == other else 1 for other in range(len(shape))] for dim in range(len(shape)))
    return tuple(torch.arange(size).view(view).expand(shape) for size, view in zip(shape, views, strict=True))


def _cells(codec: Codec, num_dims: int) -> tuple[Shape, Shape]:
    """Along each dim, the number of coordinates per element of the codes, and per element of the scales."""
    return (*(1 for _ in range(num_dims - 1)), codec.per_byte), codec.block


@lru_cache(maxsize=4096)
def _indices(codec: Codec, ranges: tuple[range, ...]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """The elements of codes and of scales that a slice needs. Cached, since a model has many weights of one shape."""
    codes, scales = _cells(codec, len(ranges))
    return tuple(map(_covering, ranges, codes)), tuple(map(_covering, ranges, scales))


@lru_cache(maxsize=4096)
def _geometry(codec: Codec, ranges: tuple[range, ...]) -> tuple[object, ...]:
    cells = map(math.lcm, *_cells(codec, len(ranges)))
    return tuple((run.start % cell, len(run), run.step) for run, cell in zip(ranges, cells, strict=True))


def _run(numbers: Tensor) -> tuple[range, int | None]:
    """The coordinates of a slice along one dim of the weight, and the dim of the slice along which they change."""
    axes = [dim for dim, size in enumerate(numbers.shape) if size > 1 and numbers.stride(dim)]
    first = int(numbers[(0,) * numbers.dim()])
    if not axes:
        return range(first, first + 1), None
    (axis,) = axes
    line = numbers[tuple(slice(None) if dim == axis else 0 for dim in range(numbers.dim()))]
    step = int(line[1]) - first
    run = range(first, first + step * len(line), step)
    if step < 1 or int(line[-1]) != run[-1]:
        raise CheckpointError(
            f"the coordinates of an encoded slice must have even steps, found {line[:8].tolist()}...: load the model "
            "from a folder of plain tensors, and report this"
        )
    return run, axis


def _covering(run: range, cell: int) -> slice:
    """The elements of a grid whose cells contain all coordinates of ``run``."""
    if cell == 1:
        return slice(run.start, run[-1] + 1, run.step)
    return slice(run.start // cell, run[-1] // cell + 1)


def _within(numbers: Tensor, run: range, per_byte: int) -> Tensor:
    """Cut the numbers of ``run`` out of whole unpacked bytes, which may hold more at both ends of the last dim."""
    if per_byte == 1:
        return numbers
    start = run.start % per_byte
    return numbers[..., start : start + run[-1] - run.start + 1 : run.step]


def _fills(run: range, block: int) -> bool:
    """Whether the coordinates cover whole blocks."""
    return block > 1 and run.step == 1 and run.start % block == 0 and len(run) % block == 0


def _spread(scales: Tensor, dim: int, run: range, block: int) -> Tensor:
    """Scales repeated along ``dim``, so that there is one for each coordinate of ``run``, or a single one for all."""
    if block == 1 or scales.shape[dim] == 1:
        return scales
    return scales.index_select(dim, _places(run.start % block, len(run), run.step, block, scales.device))


@lru_cache(maxsize=64)
def _places(start: int, size: int, step: int, block: int, device: torch.device) -> Tensor:
    """For each coordinate of a run, the index of its block, counted from the first block of the run."""
    return (torch.arange(size, device=device) * step + start) // block
