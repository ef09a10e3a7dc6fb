"""The kernel behind ``batches.py``: the codes and scales of many shards of one shape in one launch.

A program reads whole blocks once: it finds their largest numbers, decides on the scales, and writes scales and codes.
Every rule is a rule of ``rules/codec.py``, with equal bits. Codes and scales are rounded by integers, which give equal
bits on every GPU, also on one without FP8.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_bridge.rules.codec import MOST, smallest_scale
from mcore_bridge.weights.sent.batches import Blocks

_TILE = 1 << 13
"""Numbers that a program encodes at once, if blocks are smaller."""
_KINDS = {"fp8": 0, "mxfp4": 1, "int4": 2}
_FLOATS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def encode_blocks(
    blocks: Blocks, values: Tensor, kept: Tensor | None, codes: Tensor, scales: Tensor, not_finite: Tensor
) -> None:
    """Encode shards, on the current stream of the device of ``codes``.

    Args:
        blocks: what they have in common.
        values: the addresses of their numbers, int64 [shards]. Each shard is contiguous.
        kept: scales of files in the shape of ``scales``. A block keeps its scale if this reproduces all numbers. None:
            all scales are new.
        codes: where to write codes, uint8 [shards, bytes]; the first bytes of a row are used.
        scales: where to write scales, [shards, *blocks.grid]; as uint8 if they have one byte.
        not_finite: where to write 1 for shards with NaN or infinity, int32 [shards].
    """
    rows, columns = blocks.shape
    height, width = blocks.cells
    tall, wide = triton.next_power_of_2(height), triton.next_power_of_2(width)
    groups = 1 if height > 1 else max(1, min(_TILE // wide, triton.next_power_of_2(blocks.grid[1])))
    lines = tall if height > 1 else max(1, min(_TILE // (wide * groups), triton.next_power_of_2(rows)))
    across, down = -(-blocks.grid[1] // groups), -(-blocks.grid[0] // (1 if height > 1 else lines))
    rounded = blocks.codec.rounded_to
    is_bytes = scales.dtype == torch.uint8
    _encode[(across * down, len(codes))](
        values, scales if kept is None else kept, codes, scales, not_finite,
        rows, columns, *blocks.grid, codes.stride(0), height, width, across,
        float(MOST[blocks.codec.kind]), 0.0 if is_bytes else smallest_scale(blocks.scales),
        VALUE=_FLOATS[blocks.dtype], KIND=_KINDS[blocks.codec.kind], KEPT=kept is not None, BYTES=is_bytes,
        POWERS=blocks.powers or is_bytes, ROUNDED=rounded is not None and rounded != torch.float32,
        ROUND=_FLOATS[rounded or torch.float32], TALL=height > 1, LINES=lines, GROUPS=groups, WIDE=wide,
        num_warps=4 if lines * groups * wide <= _TILE else 8,
    )  # fmt: skip


def _jit(function: Any) -> Any:
    return triton.jit(function)


@_jit
def _code(numbers, KIND: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """The nearest code of each number, int32; of mxfp4, numbers are doubled."""
    if KIND == 0:
        bits = numbers.to(tl.int32, bitcast=True)
        size = tl.minimum(tl.abs(numbers), 448.0)
        even = size.to(tl.int32, bitcast=True)
        even = (
            even + 0x7FFFF + ((even >> 20) & 1) >> 20
        ) - 960  # 120, by which the exponents differ, in steps of 1 / 8
        small = (size * 512.0 + 8388608.0 - 8388608.0).to(tl.int32)
        return tl.where(size < 0.015625, small, even) | ((bits >> 24) & 0x80)
    if KIND == 2:
        return (tl.minimum(tl.maximum(numbers, -8.0), 7.0) + 12582912.0 - 12582912.0).to(tl.int32) + 8  # 1.5 * 2 ** 23
    size = tl.abs(numbers)  # middles between neighbours; a number in a middle gets the even code
    code = (size > 0.5).to(tl.int32) + (size >= 1.5).to(tl.int32) + (size > 2.5).to(tl.int32)
    code += (size >= 3.5).to(tl.int32) + (size > 5.0).to(tl.int32) + (size >= 7.0).to(tl.int32)
    code += (size > 10.0).to(tl.int32)
    return code + (numbers.to(tl.int32, bitcast=True) < 0).to(tl.int32) * 8


@_jit
def _number(code, KIND: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """The value of each code, fp32; doubled for mxfp4."""
    if KIND == 0:
        size = tl.where(
            (code & 0x78) == 0,
            (code & 7).to(tl.float32) * 0.001953125,
            ((code & 0x7F) + 960 << 20).to(tl.float32, bitcast=True),
        )
        return tl.where(code >= 0x80, -size, size)
    if KIND == 2:
        return (code - 8).to(tl.float32)
    half = code & 7
    size = tl.where(half < 4, half, tl.where(half < 6, half * 2 - 4, half * 4 - 16))
    return tl.where(code >= 8, -size.to(tl.float32), size.to(tl.float32))


@_jit
def _rounded(numbers, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """The nearest numbers that ``DTYPE`` has, as fp32; those with an even last bit from the middle."""
    if tl.bfloat16 == DTYPE:
        bits = numbers.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return numbers.to(DTYPE).to(tl.float32)


@_jit
def _factor(stored, KIND: tl.constexpr, BYTES: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Stored scales as fp32; halved for mxfp4, whose numbers are doubled."""
    if not BYTES:
        return stored.to(tl.float32)
    exponent = stored.to(tl.int32)
    if KIND == 1:
        exponent -= 1
    bits = tl.where(exponent > 0, exponent << 23, tl.where(exponent == 0, 0x400000, 0x200000))  # below: no normal ones
    return bits.to(tl.float32, bitcast=True)


@_jit
def _encode(  # type: ignore[no-untyped-def]
    values, kept, codes, scales, not_finite, rows, columns, grid_rows, grid_columns, stride, height, width, across,
    most, smallest,
    VALUE: tl.constexpr, KIND: tl.constexpr, KEPT: tl.constexpr, BYTES: tl.constexpr, POWERS: tl.constexpr,  # noqa: N803
    ROUNDED: tl.constexpr, ROUND: tl.constexpr, TALL: tl.constexpr, LINES: tl.constexpr, GROUPS: tl.constexpr,  # noqa: N803
    WIDE: tl.constexpr,  # noqa: N803
):  # fmt: skip
    tile, shard = tl.program_id(0), tl.program_id(1).to(tl.int64)
    source = tl.load(values + shard).to(tl.pointer_type(VALUE))
    line, group, place = tl.arange(0, LINES), tile % across * GROUPS + tl.arange(0, GROUPS), tl.arange(0, WIDE)
    if TALL:
        row = tile // across * height + line
        inside = (line < height) & (row < rows)
        grid_row = tile // across + tl.zeros([1], tl.int32)
    else:
        row = tile // across * LINES + line
        inside = row < rows
        grid_row = row
    column = group[:, None] * width + place[None, :]
    there = inside[:, None, None] & ((place < width)[None, :] & (column < columns))[None, :, :]
    at = row.to(tl.int64)[:, None, None] * columns + column[None, :, :]
    numbers = tl.load(source + at, mask=there, other=0.0).to(tl.float32)
    bits = tl.max(numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2)
    if TALL:
        bits = tl.max(bits, axis=0)[None, :]
    tl.store(not_finite + shard + tl.zeros_like(bits), tl.full(bits.shape, 1, tl.int32), mask=bits >= 0x7F800000)
    amax = bits.to(tl.float32, bitcast=True)
    if KIND == 1:
        exponent = tl.minimum(tl.maximum((bits >> 23) - 2, 0), 254)
        stored = tl.where(bits > 0, exponent, 127).to(tl.uint8)
    elif POWERS:
        exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)  # 448 is 1.75 * 2 ** 8
        exponent = tl.where(bits > 0, tl.minimum(tl.maximum(exponent, 1), 254), 127)
        stored = exponent.to(tl.uint8) if BYTES else (exponent << 23).to(tl.float32, bitcast=True)
    else:
        stored = tl.div_rn(amax, tl.zeros_like(amax) + most)
    if not BYTES:
        stored = tl.where(bits > 0, tl.maximum(stored, smallest), 1.0)
        stored = _rounded(stored, scales.dtype.element_ty).to(scales.dtype.element_ty)
    grid_at = (shard * grid_rows + grid_row[:, None]) * grid_columns + group[None, :]
    in_grid = (grid_row < grid_rows)[:, None] & (group < grid_columns)[None, :]
    if KEPT:
        old = tl.load(kept + grid_at, mask=in_grid, other=1)
        scale = _factor(old, KIND, BYTES)[:, :, None]
        quotient = tl.where(scale == 0, 0.0, tl.div_rn(numbers, tl.zeros_like(numbers) + scale))
        again = _number(_code(quotient, KIND), KIND) * scale
        if ROUNDED:
            again = _rounded(again, ROUND)
        differs = tl.max(((_rounded(again, VALUE) != numbers) & there).to(tl.int32), axis=2)
        if TALL:
            differs = tl.max(differs, axis=0)[None, :]
        stored = tl.where(differs > 0, stored, old)
    tl.store(scales + grid_at, stored, mask=in_grid)
    scale = _factor(stored, KIND, BYTES)[:, :, None]
    code = _code(tl.where(scale == 0, 0.0, tl.div_rn(numbers, tl.zeros_like(numbers) + scale)), KIND)
    target = codes + shard * stride
    if KIND == 0:
        tl.store(target + at, code.to(tl.uint8), mask=there)
    else:
        low, high = tl.split(tl.reshape(code, [LINES, GROUPS, WIDE // 2, 2]))
        pair = tl.arange(0, WIDE // 2)
        column = group[:, None] * (width // 2) + pair[None, :]
        there = inside[:, None, None] & ((pair < width // 2)[None, :] & (column < columns // 2))[None, :, :]
        at = row.to(tl.int64)[:, None, None] * (columns // 2) + column[None, :, :]
        tl.store(target + at, (low | high << 4).to(tl.uint8), mask=there)
