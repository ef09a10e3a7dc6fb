"""Values of HF tensors while an engine map is made: drawn values, and digits that identify each element.

Drawn floats are between 1/8 and 2 in size, so that no sum or product hides them. They are the same for the same seed
and name. To probe, all elements of all HF tensors are numbered from 1 on. One load has one digit of these numbers in
place of the weights, so there are as many loads as digits.

A digit has to survive a copy of bits, and a cast from one float dtype to a wider one or back. So a digit of a float is
the bits of a finite bfloat16, counted from 0 on. In float16 it is a whole number below 2048. In 8 bits it is the bits
of a finite float.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate
from random import Random

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from mcore_bridge.errors import TransferError
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.plan.runs import runs_within

_PATTERNS = {
    torch.bfloat16: (0x81FF, 0x3E00),
    torch.float16: (0x8FFF, 0x3000),
    torch.float32: (0x81FFFFFF, 0x3E000000),
    torch.float64: (0x803FFFFFFFFFFFFF, 0x3FC0000000000000),
    torch.float8_e4m3fn: (0x9F, 0x20),
    torch.float8_e5m2: (0x8F, 0x30),
    torch.float8_e8m0fnu: (0x03, 0x7C),
    torch.bool: (0x01, 0x00),
}
"""Bits that are drawn, and bits that are always set, which belong to the exponent. Integers are drawn whole."""
_STRETCH = 1 << 16
"""Words of 8 bytes that are taken from those that were drawn at once."""
_TOGETHER = 64 << 20
"""Bytes that are drawn at once, since it costs time to leave the modes of torch in which a loader runs."""
_ALL = {size: (1 << 8 * size) - 1 for size in (1, 2, 4, 8)}
_CHUNK = 1 << 24
"""Elements whose numbers are in memory at once, 8 bytes each."""
_BASES = {
    torch.bfloat16: 0x7F80,
    torch.float32: 0x7F80,
    torch.float64: 0x7F80,
    torch.float16: 2048,
    torch.float8_e4m3fn: 0x7F,
    torch.float8_e5m2: 0x7C,
    torch.bool: 2,
}
"""How many values a digit has. Integers have 128, or 2 ** 15 from two bytes on."""


def drawn_values(specs: Sequence[TensorSpec], seed: int, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Pairs of a name and a contiguous tensor in memory of its own, as a loader takes them.

    Words of 8 bytes are drawn once. Each stretch of a tensor is these words, from another one on and with other bits
    flipped, because that takes no longer than a copy.
    """
    for together in runs_within(specs, lambda spec: spec.num_bytes, _TOGETHER):
        with torch._C.DisableTorchFunction(), _disable_current_modes():  # a loader's own, and that of a recorder
            drawn = deque((spec.name, _drawn(spec, seed, device)) for spec in together)
        while drawn:
            yield drawn.popleft()


def _drawn(spec: TensorSpec, seed: int, device: torch.device) -> Tensor:
    size = _STRETCH if device.type == "cpu" else 64 * _STRETCH  # that is in a CPU's cache; a GPU wants few kernels
    patterns = _PATTERNS.get(spec.dtype, (_ALL[spec.dtype.itemsize], 0))
    drawn, fixed = (_repeated(bits, spec.dtype.itemsize) for bits in patterns)
    numbers = _numbers(device, 2 * size, drawn, fixed)
    words = torch.empty(-(-spec.num_bytes // 8), dtype=torch.int64, device=device)
    mix = Random(f"{seed} {spec.name}")
    for start in range(0, len(words), size):
        stretch, first = words[start : start + size], mix.randrange(size)
        torch.bitwise_xor(numbers[first : first + len(stretch)], mix.getrandbits(63) & drawn, out=stretch)
    return words.view(torch.uint8)[: spec.num_bytes].view(spec.dtype).view(spec.shape)


@cache
def _numbers(device: torch.device, count: int, drawn: int, fixed: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(1)
    words = torch.empty(count, dtype=torch.int64, device=device).random_(generator=generator)
    return words.bitwise_and_(drawn).bitwise_or_(fixed)


def _repeated(bits: int, itemsize: int) -> int:
    """A signed word of 8 bytes that repeats ``bits``."""
    word = int.from_bytes(bits.to_bytes(itemsize, "little") * (8 // itemsize), "little")
    return word - (word >> 63 << 64)


class Numbering:
    """The running numbers of the elements of HF tensors, and their digits."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self.specs = specs
        sizes = [torch.Size(spec.shape).numel() for spec in specs]
        self.starts = [1, *accumulate(sizes, initial=1)][1:]
        """The number of each tensor's first element; last, the number after that of the very last element."""
        self.base = min((_base(spec.dtype) for spec in specs), default=2)
        self.num_digits = 2
        while self.base**self.num_digits < self.starts[-1]:
            self.num_digits += 1

    def values(self, place: int, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """The digits at ``place``, from 0 on, as HF tensors."""
        for spec, start in zip(self.specs, self.starts, strict=False):
            tensor = torch.empty(torch.Size(spec.shape).numel(), dtype=spec.dtype, device=device)
            for first in range(0, tensor.numel(), _CHUNK):
                part = tensor[first : first + _CHUNK]
                numbers = torch.arange(start + first, start + first + part.numel(), device=device)
                part.copy_(_encoded(numbers // self.base**place % self.base, spec.dtype))
            yield spec.name, tensor.view(spec.shape)

    def digits(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """The digits that an engine's tensor holds, int64; negative where an element is no digit.

        Args:
            dtype: the dtype of the HF tensors that went into it.
        """
        try:
            values = tensor if tensor.dtype == dtype else tensor.to(dtype)
            digits = _decoded(values)
            if tensor.dtype != dtype:
                digits = torch.where(values.to(tensor.dtype) == tensor, digits, -1)
        except RuntimeError as error:  # torch has not every cast
            raise TransferError(f"no digits can be read off {tensor.dtype}, of {dtype}: {error}") from None
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
