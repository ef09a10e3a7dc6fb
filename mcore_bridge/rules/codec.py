"""A codec computes numbers from the encoded weights of a file. Layouts only move numbers; all arithmetic is here.

A file holds *codes*, one for each number, and *scales*, one for each block of numbers. A code is a byte or half a byte,
and a table gives its value. The number is value times scale: one product in fp32, rounded once to the requested dtype.
Fields of ``Codec`` describe publishers that compute otherwise.

Decoding is elementwise, so a slice of the decoded tensor is the decoded slice. Encoding will be added here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["fp8", "mxfp4", "int4", "nvfp4"]

PER_BYTE = {"fp8": 1, "mxfp4": 2, "int4": 2, "nvfp4": 2}
"""Numbers in a byte of codes. Of two, the first is in the low half."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_DOUBLED = "mxfp4"
"""For this kind, values are doubled and scales are halved. So 2 ** 128, the largest scale, is also a number of fp32."""
_POWER_BIAS = 127 + 1
_INT4_OFFSET = 8


@dataclass(frozen=True, slots=True)
class Codec:
    """How a file holds the numbers of one weight.

    Attributes:
        kind: the kind of codes.
        block: the number of elements that share a scale, along each dim of the stored weight.
        rounded_to: a dtype to which products are rounded before the requested one. None: they are not.
        overall: how a single number for the whole weight changes each scale; "" if there is no such number.
    """

    kind: Kind
    block: tuple[int, ...]
    rounded_to: torch.dtype | None = None
    overall: Literal["", "multiplies", "divides"] = ""

    def __str__(self) -> str:
        name = "float8_e4m3fn" if self.kind == "fp8" else self.kind
        return f"{name}[{'x'.join(map(str, self.block[-2:]))}]"

    @property
    def per_byte(self) -> int:
        """Numbers in a byte of codes, along the last dim."""
        return PER_BYTE[self.kind]


def numbers_of(codec: Codec, codes: Tensor) -> Tensor:
    """The values of codes without scales: from uint8 [..., bytes] to fp32 [..., bytes * per_byte]."""
    if codec.kind == "fp8":
        return codes.view(torch.float8_e4m3fn).float()
    table = _table(codec.kind, codes.device)
    numbers = table.index_select(0, codes.flatten().int()).view(torch.float32)
    return numbers.view(*codes.shape[:-1], codes.shape[-1] * codec.per_byte)


def scales_of(codec: Codec, scales: Tensor, overall: Tensor | None = None) -> Tensor:
    """Scales as fp32, with the same shape. Bytes (uint8) are exponents of powers of two.

    Args:
        codec: the codec of the weight.
        scales: the scales as stored.
        overall: the single number for the whole weight, fp32, in a shape that broadcasts with the scales.
    """
    if scales.dtype == torch.uint8:
        scales = _powers(scales.device).index_select(0, scales.flatten().int()).view(scales.shape)
    scales = scales.float()
    if overall is None:
        return scales
    return scales * overall if codec.overall == "multiplies" else scales / overall


def decoded(codec: Codec, numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers times scales (both fp32; the scales broadcast to the numbers), in ``dtype``."""
    if codec.rounded_to is None or codec.rounded_to == torch.float32:
        return torch.mul(numbers, scales, out=torch.empty_like(numbers, dtype=dtype))
    return (numbers * scales).to(codec.rounded_to).to(dtype)


@cache
def _table(kind: Kind, device: torch.device) -> Tensor:
    """The values in each of the 256 bytes: two fp32 numbers as one element of 8 bytes."""
    codes = torch.arange(256, dtype=torch.uint8)
    if kind == "int4":
        half = torch.arange(16).float() - _INT4_OFFSET
    else:
        half = torch.tensor([*_E2M1, *(-value for value in _E2M1)]) * (2 if kind == _DOUBLED else 1)
    low, high = (codes & 0xF).long(), (codes >> 4).long()
    return torch.stack((half[low], half[high]), -1).view(torch.float64).flatten().to(device)


@cache
def _powers(device: torch.device) -> Tensor:
    """Half of ``2 ** (byte - 127)`` for each byte, in fp32."""
    exponents = torch.arange(256, dtype=torch.float64) - _POWER_BIAS
    return torch.exp2(exponents).float().to(device)
