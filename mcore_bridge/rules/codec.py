"""A codec computes numbers from codes and scales, and back. Layouts only move numbers; all arithmetic is here.

A file holds *codes*, one for each number, and *scales*, one for each block of numbers. A code is a byte or half a byte,
and a table gives its value. The number is value times scale: one product in fp32, rounded once to the requested dtype.
Fields of ``Codec`` describe publishers that compute otherwise.

Decoding is elementwise, so a slice of the decoded tensor is the decoded slice. Encoding is elementwise, too, if the
scales are known. New scales need only the largest magnitude of each block, and a maximum is exact in any order. With
the scales of a file, encoding gives back the codes of the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["fp8", "mxfp4", "int4", "nvfp4"]
_E8M0 = getattr(torch, "float8_e8m0fnu", None)

PER_BYTE = {"fp8": 1, "mxfp4": 2, "int4": 2, "nvfp4": 2}
"""Numbers in a byte of codes. Of two, the first is in the low half."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_DOUBLED = "mxfp4"
"""For this kind, values are doubled and scales are halved. So 2 ** 128, the largest scale, is also a number of fp32."""
_BIAS = 127
"""Of the exponents of fp32, and of scales that are bytes."""
_INT4_OFFSET = 8
MOST: dict[Kind, float] = {"fp8": 448.0, "mxfp4": 6.0, "int4": 7.0, "nvfp4": 6.0}
"""The largest value of a code."""
_OF_OVERALL = 448.0
"""The largest scale of a block beside an overall number."""
_ROUNDED_DOWN = 464 / 448
"""Up to this multiple of the largest scale, scales are rounded to the largest one."""
_E2M1_BORDERS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""The middles between neighbours of ``_E2M1``. A number in a middle gets the even code."""


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
    """Scales as fp32, with the same shape. For mxfp4, bytes (uint8 or e8m0) are exponents of powers of two.

    Args:
        codec: the codec of the weight.
        scales: the scales as stored.
        overall: the single number for the whole weight, fp32, in a shape that broadcasts with the scales.
    """
    if codec.kind == _DOUBLED:
        exponents = scales.view(torch.uint8)
        scales = _powers(scales.device).index_select(0, exponents.flatten().int()).view(scales.shape)
    scales = scales.float()
    if overall is None:
        return scales
    return scales * overall if codec.overall == "multiplies" else scales / overall


def as_bytes(scales: Tensor) -> Tensor:
    """View scales of one byte as uint8, since torch cannot choose between elements of float8; others stay."""
    return scales.view(torch.uint8) if scales.dtype.itemsize == 1 else scales


def decoded(codec: Codec, numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers times scales (both fp32; the scales broadcast to the numbers), in ``dtype``."""
    if codec.rounded_to is None or codec.rounded_to == torch.float32:
        return torch.mul(numbers, scales, out=torch.empty_like(numbers, dtype=dtype))
    return (numbers * scales).to(codec.rounded_to).to(dtype)


def new_scales(
    codec: Codec, amax: Tensor, dtype: torch.dtype, *, powers: bool = False, overall: Tensor | None = None
) -> Tensor:
    """Scales for blocks of new numbers, by one rule for each kind of codes.

    The largest number of a block gets the largest code. A block of zeros has the scale 1. CPU and GPU give equal bits.

    Args:
        codec: the codec of the weight.
        amax: the largest magnitude of each block, fp32.
        dtype: the dtype of the scales; for mxfp4, uint8 or e8m0.
        powers: whether scales are rounded up to powers of two.
        overall: the single number for the whole weight, fp32, in a shape that broadcasts with the scales.

    Returns:
        Scales in the shape of ``amax``, as a file stores them.
    """
    if codec.kind == "mxfp4":  # as the OCP standard says: the exponent of the largest number, less the largest code's
        exponents = torch.frexp(amax).exponent - 1 - 2 + _BIAS
        return torch.where(amax > 0, exponents.clamp(0, 254), _BIAS).to(torch.uint8).view(dtype)
    most = torch.full((), MOST[codec.kind], device=amax.device)  # a tensor: a GPU would multiply by 1 / number
    scales = amax / most
    if overall is not None:  # in the order of ModelOpt, and of compressed-tensors
        beside = amax / (most * overall) if codec.overall == "multiplies" else scales * overall
        scales = beside.clamp(max=_OF_OVERALL)
    elif powers or dtype == _E8M0:
        mantissa, exponent = torch.frexp(amax)
        exponent = (exponent - 9 + (mantissa > 0.875).int()).clamp(-126, 127)  # 448 is 0.875 * 2 ** 9
        scales = (exponent + _BIAS << 23).view(torch.float32)  # by its bits: a GPU's powers may be inexact
    smallest = smallest_scale(dtype)
    return torch.where(amax > 0, scales.clamp(min=smallest), 1.0).to(dtype)


def new_overall(codec: Codec, amax: Tensor) -> Tensor:
    """The overall number for a whole weight whose largest magnitude is ``amax`` (fp32)."""
    most = torch.full((), MOST[codec.kind] * _OF_OVERALL, device=amax.device)
    fresh = amax / most if codec.overall == "multiplies" else most / amax
    return torch.where(amax > 0, fresh, 1.0)


def is_overall_enough(codec: Codec, amax: Tensor, overall: Tensor) -> Tensor:
    """Whether the largest block of a weight can have a scale beside this overall number; see ``new_overall``."""
    most = torch.full((), MOST[codec.kind] * _OF_OVERALL * _ROUNDED_DOWN, device=amax.device)
    return amax <= most * overall if codec.overall == "multiplies" else amax * overall <= most


def divided(codec: Codec, values: Tensor, scales: Tensor) -> Tensor:
    """Values by scales (the scales are fp32 and broadcast to the values): the inverse of ``decoded``, before rounding.

    Where a scale is 0, the result is 0.
    """
    return torch.where(scales == 0, 0.0, values.float() / scales)


def codes_of(codec: Codec, numbers: Tensor) -> Tensor:
    """The nearest codes: from fp32 [..., n] to uint8 [..., n / per_byte], the inverse of ``numbers_of``.

    Numbers beyond the largest code get the largest code. ``n`` must be a multiple of ``codec.per_byte``.
    """
    if codec.kind == "fp8":
        return numbers.clamp(-MOST["fp8"], MOST["fp8"]).to(torch.float8_e4m3fn).view(torch.uint8)
    if codec.kind == "int4":
        half = (numbers.round().clamp(-_INT4_OFFSET, _INT4_OFFSET - 1) + _INT4_OFFSET).to(torch.uint8)
    else:
        half = torch.bucketize(numbers.abs(), _borders(codec.kind, numbers.device), right=True, out_int32=True)
        half = (half + torch.signbit(numbers) * 8).to(torch.uint8)
    return half[..., 0::2] | half[..., 1::2] << 4


@cache
def _borders(kind: Kind, device: torch.device) -> Tensor:
    """The smallest number of each code of e2m1 but the first. Middles above an even code belong to this code."""
    borders = torch.tensor(_E2M1_BORDERS) * (2 if kind == _DOUBLED else 1)
    above = torch.nextafter(borders, torch.tensor(torch.inf))
    return torch.where(torch.arange(len(borders)) % 2 == 0, above, borders).to(device)


def smallest_scale(dtype: torch.dtype) -> float:
    """The smallest normal number of a dtype of scales; of fp8, the smallest above 0."""
    if dtype == torch.float8_e4m3fn:
        return 2.0**-9
    return 2.0**-127 if dtype == _E8M0 else torch.finfo(dtype).tiny


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
    exponents = torch.arange(256, dtype=torch.float64) - _BIAS - 1
    return torch.exp2(exponents).float().to(device)
