"""Finds out from numbered elements where a loader puts each element of the HF tensors, if recording does not show it.

All elements of all HF tensors are numbered from 1 on. Each load passes one digit of these numbers in place of the
weights, so there are as many loads as digits. A digit has to survive a copy of bits, and a cast from one float dtype to
a wider dtype or back. So each digit is stored as a finite bfloat16, by the number of its bits. For float16 tensors a
digit is a whole number below 2048. For floats of 8 bits a digit is stored as the bits of a finite float.

The numbers in a tensor become slices, in any order. Elements become runs with one step, runs become rows of a
rectangle, and so on, as long as this makes fewer groups.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor

from mcore_bridge.errors import TransferError
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.engine.engine_tensors import EngineModel, Paths, described
from mcore_bridge.weights.engine.loader_thread import Loader
from mcore_bridge.weights.plan.boxes import BoxCopy
from mcore_bridge.weights.plan.engine_map import EngineTensor, SliceCopy, SliceFill
from mcore_bridge.weights.transfer.copier import WORDS

Numbers = np.ndarray[tuple[int], np.dtype[np.int64]]
Steps = tuple[tuple[int, int, int], ...]
"""For each dim: its size, and its strides in the source and in the target."""
_CHUNK = 1 << 24
"""The most elements for which indices of 8 bytes are in memory at once."""
_BASES = {
    torch.bfloat16: 0x7F80,
    torch.float32: 0x7F80,
    torch.float64: 0x7F80,
    torch.float16: 2048,
    torch.float8_e4m3fn: 0x7F,
    torch.float8_e5m2: 0x7C,
    torch.bool: 2,
}
"""How many values a digit has. For integers there are 128, or 2 ** 15 if they have two bytes or more."""
_DIFFERENT = 1 << 62
"""Marks an element whose bits differed between two loads, so it is no constant."""
_SAMPLE = 100_000


MOST_SLICES = 1 << 16
"""The most slices of one tensor. With more slices, the loader writes the tensor."""


def probe(
    numbering: RunningNumbers,
    load: Loader,
    source: EngineModel,
    dtypes: Mapping[str, torch.dtype],
    device: torch.device,
) -> Iterator[tuple[str, list[SliceCopy], list[SliceFill]]]:
    """Load digits in place of weights. Yield the slices of each tensor if all of its elements are numbers or constants.

    Args:
        numbering: the HF tensors.
        dtypes: the engine's tensors by name, with the dtype of the HF tensors that go into each.
        device: the device on which the loader takes HF tensors.
    """
    numbers: dict[str, Tensor] = {}
    bits: dict[str, Tensor] = {}
    tensors: dict[str, EngineTensor] = {}
    for place in range(numbering.num_digits):
        load(numbering.values(place, device))
        for name, tensor in Paths(dtypes).tensors(source).items():
            tensors[name], flat = described(name, tensor), _in_memory_order(tensor)
            digits = numbering.digits(flat, dtypes[name]).cpu()
            raw = flat.view(WORDS[tensor.element_size()]).cpu()
            if not place:
                numbers[name], bits[name] = torch.zeros_like(digits), raw
            scaled = numbers[name] + digits * numbering.base**place
            numbers[name] = torch.where((digits < 0) | (numbers[name] < 0), -1, scaled)
            bits[name] = torch.where(bits[name] == raw, raw.to(torch.int64), _DIFFERENT)
    for name in numbers:
        slices = _slices(tensors[name], numbering, numbers[name].numpy(), bits[name].numpy())
        if slices:
            yield name, *slices


def _slices(
    tensor: EngineTensor, numbering: RunningNumbers, numbers: Numbers, bits: Numbers
) -> tuple[list[SliceCopy], list[SliceFill]] | None:
    places, starts = _memory_places(tensor), np.array(numbering.starts)
    owners = np.searchsorted(starts, numbers, side="right") - 1
    is_number = (numbers > 0) & (owners < len(numbering.specs))
    if (~is_number & (bits == _DIFFERENT)).any():
        return None
    boxes = _boxes(numbers[is_number] - starts[owners[is_number]], places[is_number], owners[is_number])
    copies = [
        SliceCopy(numbering.specs[owner].name, tensor.name, box, numbering.specs[owner].dtype != tensor.dtype)
        for owner, box in islice(boxes, MOST_SLICES + 1)
    ]
    constant = bits[~is_number] % (1 << 8 * tensor.dtype.itemsize)
    boxes = _boxes(np.zeros(len(constant), np.int64), places[~is_number], constant)
    return copies, [SliceFill(tensor.name, box, bits) for bits, box in boxes]


class RunningNumbers:
    """The running numbers of the elements of HF tensors, and their digits.

    Args:
        specs: the HF tensors in the order in which a loader gets them.
        numbered: the names of HF tensors to number; all other tensors are zero.
    """

    def __init__(self, specs: Sequence[TensorSpec], numbered: Collection[str]) -> None:
        self._all = specs
        self.specs = specs = [spec for spec in specs if spec.name in numbered]
        sizes = [torch.Size(spec.shape).numel() for spec in specs]
        self.starts = [1, *accumulate(sizes, initial=1)][1:]
        """The number of each tensor's first element, followed by the total number of elements plus 1."""
        self.base = min((_base(spec.dtype) for spec in specs), default=2)
        self.num_digits = 2
        while self.base**self.num_digits < self.starts[-1]:
            self.num_digits += 1

    def values(self, place: int, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """The digits at ``place``, from 0 on, as HF tensors."""
        starts = dict(zip((spec.name for spec in self.specs), self.starts, strict=False))
        for spec in self._all:
            if spec.name not in starts:
                yield spec.name, torch.zeros(spec.shape, dtype=spec.dtype, device=device)
                continue
            tensor = torch.empty(torch.Size(spec.shape).numel(), dtype=spec.dtype, device=device)
            for first in range(0, tensor.numel(), _CHUNK):
                part, start = tensor[first : first + _CHUNK], starts[spec.name] + first
                numbers = torch.arange(start, start + part.numel(), device=device)
                part.copy_(_encoded(numbers // self.base**place % self.base, spec.dtype))
            yield spec.name, tensor.view(spec.shape)

    def digits(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """The digits in an engine's tensor, int64; negative if an element is no digit.

        Args:
            dtype: the dtype of the HF tensors that went into it.
        """
        try:
            values = tensor if tensor.dtype == dtype else tensor.to(dtype)
            digits = _decoded(values)
            if tensor.dtype != dtype:
                digits = torch.where(values.to(tensor.dtype) == tensor, digits, -1)
        except RuntimeError as error:  # torch does not have every cast
            raise TransferError(f"no digits of {dtype} can be read from {tensor.dtype}: {error}") from None
        return torch.where(digits < self.base, digits, -1)


def _base(dtype: torch.dtype) -> int:
    return _BASES.get(dtype, 128 if dtype.itemsize == 1 else 1 << 15)


def _encoded(digits: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype in (torch.bfloat16, torch.float32, torch.float64):
        return digits.to(torch.int16).view(torch.bfloat16).to(dtype)
    if dtype.is_floating_point and dtype.itemsize == 1:
        return digits.to(torch.uint8).view(dtype)
    return digits.to(dtype)


def _decoded(values: Tensor) -> Tensor:
    """The inverse of ``_encoded``."""
    if values.dtype in (torch.bfloat16, torch.float32, torch.float64):
        short = values.to(torch.bfloat16)
        numbers = short.view(torch.int16).to(torch.int64)
        return torch.where(short.to(values.dtype) == values, numbers, -1)
    if values.dtype.is_floating_point and values.dtype.itemsize == 1:
        return values.view(torch.uint8).to(torch.int64)
    numbers = values.to(torch.int64)
    return torch.where(numbers.to(values.dtype) == values, numbers, -1)


@dataclass(frozen=True, slots=True)
class _Runs:
    """Groups of elements. All groups of one ``kind`` have the same shape."""

    source: Numbers
    target: Numbers
    owner: Numbers
    """For each group of elements, the number of their HF tensor."""
    kind: Numbers
    kinds: list[Steps]

    def __len__(self) -> int:
        return len(self.source)

    def sorted_by(self, *keys: Numbers) -> _Runs:
        order = np.lexsort(keys[::-1])
        return _Runs(self.source[order], self.target[order], self.owner[order], self.kind[order], self.kinds)


def _boxes(source: Numbers, target: Numbers, owner: Numbers) -> Iterator[tuple[int, BoxCopy]]:
    """Copies of slices that together cover all elements, each with its owner. Fewer copies may be possible.

    Args:
        source: the position of each element in its owner.
        target: the position of each element in the engine's tensor, in ascending order.
        owner: the number of the HF tensor that each element belongs to.
    """
    runs = _Runs(source, target, owner, np.zeros(len(source), np.int64), [()])
    while True:
        before = len(runs)
        runs = _joined(runs)
        if len(runs) < before:
            continue
        runs = _joined(runs.sorted_by(runs.owner, runs.source))  # rows that alternate in the target
        runs = runs.sorted_by(runs.target)
        if len(runs) == before:
            break
    for first_source, first_target, number, kind in zip(
        *(column.tolist() for column in (runs.source, runs.target, runs.owner, runs.kind)), strict=True
    ):
        steps = runs.kinds[kind]
        sizes, near, far = zip(*steps, strict=True) if steps else ((), (), ())
        yield number, BoxCopy.of(first_source, sizes, near, first_target, far)


def _joined(runs: _Runs) -> _Runs:
    """Join neighbours of one owner and kind if they follow each other at the most frequent distance."""
    if len(runs) < 2:
        return runs
    near, far = np.diff(runs.source), np.diff(runs.target)
    alike = (np.diff(runs.owner) == 0) & (np.diff(runs.kind) == 0) & (near >= 0) & (far > 0)
    step = _commonest(near[alike], far[alike])
    if step is None:
        return runs
    goes_on = alike & (near == step[0]) & (far == step[1])
    first = np.flatnonzero(np.concatenate([[True], ~goes_on]))
    sizes = np.diff(np.append(first, len(runs)))
    kinds, kind = _longer(runs.kinds, runs.kind[first], sizes, step)
    return _Runs(runs.source[first], runs.target[first], runs.owner[first], kind, kinds)


def _commonest(near: Numbers, far: Numbers) -> tuple[int, int] | None:
    if not len(near):
        return None
    every = max(1, len(near) // _SAMPLE)
    pairs, counts = np.unique(np.stack([near[::every], far[::every]]), axis=1, return_counts=True)
    best = pairs[:, int(counts.argmax())]
    return int(best[0]), int(best[1])


def _longer(
    kinds: Sequence[Steps], kind: Numbers, sizes: Numbers, step: tuple[int, int]
) -> tuple[list[Steps], Numbers]:
    """The kinds of runs that consist of ``sizes`` shorter runs, ``step`` apart."""
    pairs, places = np.unique(np.stack([kind, sizes]), axis=1, return_inverse=True)
    longer = [kinds[old] if size == 1 else ((size, *step), *kinds[old]) for old, size in pairs.T.tolist()]
    return longer, places.reshape(-1).astype(np.int64)


def _in_memory_order(tensor: Tensor) -> Tensor:
    """The elements in the order of their memory, [elements]."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: strides[dim], reverse=True)
    return tensor.detach().permute(order).reshape(-1)


def _memory_places(tensor: EngineTensor) -> Numbers:
    """The positions of the elements in memory, counted from the first, in the order of ``_in_memory_order``."""
    places = np.zeros(1, np.int64)
    for size, stride in sorted([*zip(tensor.shape, tensor.strides, strict=True)], key=itemgetter(1), reverse=True):
        places = (places[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return places
