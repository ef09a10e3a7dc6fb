"""The kernel behind ``encode_tables.py``: the codes and scales of many shards in one launch.

A program reads whole blocks once: it finds their largest numbers, decides on the scales, and writes scales and codes.
Every rule is a rule of ``rules/codec.py``, with equal bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

FLOATS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""What Triton calls the dtypes of numbers and factors."""


def _jit(function: Any) -> Any:
    return triton.jit(function)


@_jit
def _codes(numbers, KIND: tl.constexpr, FP8: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """The nearest code of each number, uint8; of mxfp4, numbers are doubled.

    With ``FP8`` the GPU rounds to FP8. Without it, integers do so, with equal bits.
    """
    if KIND == 0:
        if FP8:
            return tl.minimum(tl.maximum(numbers, -448.0), 448.0).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        size = tl.minimum(tl.abs(numbers), 448.0)
        bits = size.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1) >> 20) - 960  # exponents differ by 120, in steps of 1 / 8
        small = (size * 512.0 + 8388608.0 - 8388608.0).to(tl.int32)
        sign = (numbers.to(tl.int32, bitcast=True) >> 24) & 0x80
        return (tl.where(size < 0.015625, small, bits) | sign).to(tl.uint8)
    if KIND == 2:
        nearest = tl.minimum(tl.maximum(numbers, -8.0), 7.0) + 12582912.0 - 12582912.0  # 1.5 * 2 ** 23
        return (nearest.to(tl.int32) + 8).to(tl.uint8)
    size = tl.abs(numbers)  # middles between neighbours; a number in a middle gets the even code
    code = (size > 0.5).to(tl.int32) + (size >= 1.5).to(tl.int32) + (size > 2.5).to(tl.int32)
    code += (size >= 3.5).to(tl.int32) + (size > 5.0).to(tl.int32) + (size >= 7.0).to(tl.int32)
    code += (size > 10.0).to(tl.int32)
    return (code + (numbers.to(tl.int32, bitcast=True) < 0).to(tl.int32) * 8).to(tl.uint8)


@_jit
def _numbers(codes, KIND: tl.constexpr, FP8: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """The value of each code, fp32; doubled for mxfp4."""
    if KIND == 0:
        if FP8:
            return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        code = codes.to(tl.int32)
        normal = ((code & 0x7F) + 960 << 20).to(tl.float32, bitcast=True)
        size = tl.where((code & 0x78) == 0, (code & 7).to(tl.float32) * 0.001953125, normal)
        return tl.where(code >= 0x80, -size, size)
    code = codes.to(tl.int32)
    if KIND == 2:
        return (code - 8).to(tl.float32)
    half = code & 7
    size = tl.where(half < 4, half, tl.where(half < 6, half * 2 - 4, half * 4 - 16)).to(tl.float32)
    return tl.where(code >= 8, -size, size)


@_jit
def _rounded(numbers, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """The nearest numbers that ``DTYPE`` has, as fp32; those with an even last bit from the middle."""
    if tl.bfloat16 == DTYPE:
        bits = numbers.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return numbers.to(DTYPE).to(tl.float32)


@_jit
def _factors(stored, KIND: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Stored scales as fp32; halved for mxfp4, whose numbers are doubled."""
    if stored.dtype != tl.uint8:
        return stored.to(tl.float32)
    exponent = stored.to(tl.int32)
    if KIND == 1:
        exponent -= 1
    bits = tl.where(exponent > 0, exponent << 23, tl.where(exponent == 0, 0x400000, 0x200000))  # below: no normal ones
    return bits.to(tl.float32, bitcast=True)


@_jit
def _quotients(numbers, factors, CUDA: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Numbers by the factors of their blocks, rounded once; 0 where a factor is 0.

    A product with the inverse, and one correction with an exact remainder, give this rounding, too, if nothing leaves
    the range of normal numbers. They take a third of the time. Triton's interpreter on a CPU has no exact remainder.
    """
    inside = (factors >= 8.673617379884035e-19) & (factors <= 1.152921504606847e18)  # 2 ** -60, 2 ** 60
    are_usual = tl.min(tl.min(tl.min(inside.to(tl.int32), axis=2), axis=1), axis=0) == 1
    if CUDA and are_usual:
        inverse = tl.div_rn(tl.full(factors.shape, 1.0, tl.float32), factors)
        nearly = numbers * inverse
        rest = tl.fma(-nearly, tl.broadcast_to(factors, numbers.shape), numbers)
        result = tl.fma(rest, tl.broadcast_to(inverse, numbers.shape), nearly)
        sign = numbers.to(tl.int32, bitcast=True) & -2147483648  # of -0, which sums lose
        result = (result.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    else:
        result = tl.where(factors == 0, 0.0, tl.div_rn(numbers, tl.broadcast_to(factors, numbers.shape)))
    return result


@_jit
def _new(bits, most, smallest, DTYPE: tl.constexpr, KIND: tl.constexpr, POWERS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803  # fmt: skip
    """New scales, as they are stored, by the bits of the largest magnitude of each block."""
    if KIND == 1:
        exponent = tl.minimum(tl.maximum((bits >> 23) - 2, 0), 254)
        return tl.where(bits > 0, exponent, 127).to(tl.uint8)
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)  # 448 is 1.75 * 2 ** 8
    exponent = tl.where(bits > 0, tl.minimum(tl.maximum(exponent, 1), 254), 127)
    if tl.uint8 == DTYPE:
        return exponent.to(tl.uint8)
    if POWERS:
        scales = (exponent << 23).to(tl.float32, bitcast=True)
    else:
        amax = bits.to(tl.float32, bitcast=True)
        scales = tl.div_rn(amax, tl.zeros_like(amax) + most)
    return _rounded(tl.where(bits > 0, tl.maximum(scales, smallest), 1.0), DTYPE).to(DTYPE)


@_jit
def _elements(tile, across, rows, columns, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, LINES: tl.constexpr, GROUPS: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: E501, N803  # fmt: skip
    """Rows [LINES] and columns [GROUPS, WIDE] of a tile in a shard, and which elements of both are there."""
    line = tl.arange(0, LINES)
    row = tile // across * (HEIGHT if HEIGHT > 1 else LINES) + line
    inside = row < rows
    if HEIGHT > 1:
        inside = inside & (line < HEIGHT)
    group, place = tile % across * GROUPS + tl.arange(0, GROUPS), tl.arange(0, WIDE)
    column = group[:, None] * WIDTH + place[None, :]
    there = inside[:, None, None] & ((place < WIDTH)[None, :] & (column < columns))[None, :, :]
    return row, column, there


@_jit
def _at(row, column, columns):  # type: ignore[no-untyped-def]
    """Where elements are in a shard that is contiguous."""
    return row.to(tl.int64)[:, None, None] * columns + column[None, :, :]


@_jit
def _largest(numbers, HEIGHT: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """The largest number of each block of a tile."""
    if HEIGHT > 1:
        return tl.max(tl.max(numbers, axis=2), axis=0)[None, :]
    else:  # Triton would compile both
        return tl.max(numbers, axis=2)


@_jit
def _differs(numbers, there, factors, ROUND: tl.constexpr, VALUE: tl.constexpr, KIND: tl.constexpr, CUDA: tl.constexpr, FP8: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: E501, N803  # fmt: skip
    """1 for each number that its code and the factor of its block do not give back, else 0."""
    again = _numbers(_codes(_quotients(numbers, factors, CUDA), KIND, FP8), KIND, FP8) * factors
    return ((_rounded(_rounded(again, ROUND), VALUE) != numbers) & there).to(tl.int32)


@_jit
def encode(  # type: ignore[no-untyped-def]
    addresses, table, owners, kept, codes, places, scales, not_finite, most, smallest, COLUMNS: tl.constexpr,  # noqa: N803
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, VALUE: tl.constexpr, KIND: tl.constexpr, KEPT: tl.constexpr,  # noqa: N803
    POWERS: tl.constexpr, ROUND: tl.constexpr, LINES: tl.constexpr, GROUPS: tl.constexpr, WIDE: tl.constexpr,  # noqa: N803
    FEW: tl.constexpr, UNIT: tl.constexpr, ALIGNED: tl.constexpr, CUDA: tl.constexpr, PLACED: tl.constexpr,  # noqa: N803
    FP8: tl.constexpr, SKIPS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    shard = tl.load(owners + tl.program_id(0))
    row = table + shard * COLUMNS
    tensor, first, across, rows = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    columns, grid_rows, grid_columns = tl.load(row + 4) * UNIT, tl.load(row + 5), tl.load(row + 6)
    codes_at, scales_at, parts = tl.load(row + 7).to(tl.int64), tl.load(row + 8).to(tl.int64), tl.load(row + 9)
    tile = tl.program_id(0) - first
    source = tl.load(addresses + tensor).to(tl.pointer_type(VALUE))
    if ALIGNED:
        source = tl.multiple_of(source, 16)
    line, column, there = _elements(tile, across, rows, columns, HEIGHT, WIDTH, LINES, GROUPS, WIDE)
    part = tile % across // (across // parts)
    if PLACED:
        starts = tl.load(places + codes_at + line * parts + part, mask=line < rows, other=0)
        if SKIPS:  # noqa: SIM102  (a constant: without it nothing is compiled of the other)
            if tl.max(tl.abs(starts), axis=0) == 0:
                return
    numbers = tl.load(source + _at(line, column, columns), mask=there, other=0.0).to(tl.float32)
    bits = _largest(numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF, HEIGHT)
    tl.store(not_finite + shard + tl.zeros_like(bits), tl.full(bits.shape, 1, tl.int32), mask=bits >= 0x7F800000)
    stored = _new(bits, most, smallest, scales.dtype.element_ty, KIND, POWERS)
    own: tl.constexpr = 1 if HEIGHT > 1 else LINES
    grid_row, group = tile // across * own + tl.arange(0, own), tile % across * GROUPS + tl.arange(0, GROUPS)
    grid_at = scales_at + grid_row[:, None] * grid_columns + group[None, :]
    in_grid = (grid_row < grid_rows)[:, None] & (group < grid_columns)[None, :]
    if KEPT:
        old = tl.load(kept + grid_at, mask=in_grid, other=1)
        factors = _factors(old, KIND)[:, :, None]
        shows = 0
        if HEIGHT > 1:  # a block that a step has changed shows this in its first rows, so the others need no check
            of_few, few, are_there = _elements(tile, across, rows, columns, HEIGHT, WIDTH, FEW, GROUPS, WIDE)
            few = tl.load(source + _at(of_few, few, columns), mask=are_there, other=0.0).to(tl.float32)
            shows = tl.max(_largest(_differs(few, are_there, factors, ROUND, VALUE, KIND, CUDA, FP8), HEIGHT))
        if shows == 0:
            differs = _largest(_differs(numbers, there, factors, ROUND, VALUE, KIND, CUDA, FP8), HEIGHT)
            stored = tl.where(differs > 0, stored, old)
    tl.store(scales + grid_at, stored, mask=in_grid)
    code = _codes(_quotients(numbers, _factors(stored, KIND)[:, :, None], CUDA), KIND, FP8)
    if KIND != 0:
        low, high = tl.split(tl.reshape(code, [LINES, GROUPS, WIDE // 2, 2]))
        code, columns = low | high << 4, columns // 2
        line, column, there = _elements(tile, across, rows, columns, HEIGHT, WIDTH // 2, LINES, GROUPS, WIDE // 2)
    if PLACED:
        column = column - tl.multiple_of(part * (columns // parts), 16)
        at, there = starts[:, None, None] * 16 + column[None, :, :], there & (starts != 0)[:, None, None]
    else:
        at = codes_at * 16 + _at(line, column, columns)
    tl.store(codes + at, code, mask=there)
