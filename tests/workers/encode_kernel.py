"""The kernel that encodes shards on GPUs, in Triton's interpreter on a CPU, against the functions of the codec.

It needs the path of the kernel, and ``TRITON_INTERPRET`` in its environment before Triton is imported.
"""

import importlib.util
import itertools
import sys
import warnings
from types import ModuleType

import torch
from torch import Tensor

from mcore_bridge.rules.codec import Codec, codes_of, decoded, divided, new_scales, numbers_of, scales_of
from mcore_bridge.weights.sent.block_geometry import Blocks

E8M0 = getattr(torch, "float8_e8m0fnu", torch.uint8)
FORMATS = {
    "fp8 blocks": (Codec("fp8", (16, 16)), torch.float32, False),
    "fp8 blocks, bf16": (Codec("fp8", (12, 16)), torch.bfloat16, False),
    "fp8 blocks, powers": (Codec("fp8", (16, 32)), torch.float32, True),
    "fp8 blocks, e8m0": (Codec("fp8", (16, 16)), E8M0, True),
    "fp8 rows": (Codec("fp8", (1, 96), torch.bfloat16), torch.bfloat16, False),
    "mxfp4": (Codec("mxfp4", (1, 32)), torch.uint8, False),
    "int4": (Codec("int4", (1, 32), torch.float16), torch.float16, False),
}
SHAPE = (40, 96)


def module_of(path: str) -> ModuleType:
    """The module in a file."""
    spec = importlib.util.spec_from_file_location("kernel", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


KERNEL = module_of(sys.argv[1])


def as_bytes(scales: Tensor) -> Tensor:
    return scales.view(torch.uint8) if scales.dtype.itemsize == 1 else scales


def spread(blocks: Blocks, scales: Tensor) -> Tensor:
    rows, columns = blocks.cells
    factors = scales_of(blocks.codec, scales).repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return factors[: blocks.shape[0], : blocks.shape[1]]


def largest(blocks: Blocks, numbers: Tensor) -> Tensor:
    (down, across), (rows, columns) = blocks.grid, blocks.cells
    padded = torch.zeros(down * rows, across * columns)
    padded[: numbers.shape[0], : numbers.shape[1]] = numbers
    return padded.view(down, rows, across, columns).amax((1, 3))


def values_of(blocks: Blocks, codes: Tensor, scales: Tensor) -> Tensor:
    return decoded(blocks.codec, numbers_of(blocks.codec, codes), spread(blocks, scales), blocks.dtype)


def encoded(blocks: Blocks, values: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes and scales by the functions of the codec, for the whole tensor."""
    amax = largest(blocks, values.float().abs())
    scales = new_scales(blocks.codec, amax, blocks.scales, powers=blocks.powers)
    if kept is not None:
        codes = codes_of(blocks.codec, divided(blocks.codec, values, spread(blocks, kept)))
        changed = largest(blocks, (values_of(blocks, codes, kept) != values).float()) > 0
        scales = torch.where(changed, as_bytes(scales), as_bytes(kept)).view(blocks.scales)
    return codes_of(blocks.codec, divided(blocks.codec, values, spread(blocks, scales))), scales


def by_kernel(blocks: Blocks, values: list[Tensor], kept: list[Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales, and whether numbers are not finite, of several shards."""
    codes = torch.zeros(len(values), blocks.num_bytes + 256, dtype=torch.uint8)
    scales = as_bytes(torch.zeros(len(values), *blocks.grid).to(blocks.scales))
    not_finite = torch.zeros(len(values), dtype=torch.int32)
    addresses = torch.tensor([tensor.data_ptr() for tensor in values])
    old = None if kept is None else torch.stack([*map(as_bytes, kept)])
    KERNEL.encode_blocks(blocks, addresses, old, codes, scales, not_finite)
    return codes[:, : blocks.num_bytes], scales, not_finite


def bits_are_those_of_the_codec(name: str, dtype: torch.dtype) -> None:
    codec, scales, powers = FORMATS[name]
    blocks = Blocks(codec, SHAPE, (codec.block[0], codec.block[1]), dtype, (torch.uint8, ()), scales, powers)
    generator = torch.Generator().manual_seed(0)
    spreads = torch.exp2(torch.randint(-12, 1, (SHAPE[0], 1), generator=generator).float())
    values = [(torch.randn(SHAPE, generator=generator) * spreads).to(dtype) for _ in range(2)]
    values[0][:16] = 0
    values[0][:9:2, ::3] = -0.0
    expected = [encoded(blocks, tensor, None) for tensor in values]
    found = by_kernel(blocks, values, None)
    for number, (codes, own) in enumerate(expected):
        assert torch.equal(found[0][number], codes.flatten())
        assert torch.equal(found[1][number], as_bytes(own))

    read = [values_of(blocks, *pair) for pair in expected]
    read[1][-1, -1] = read[1].abs().max() * 1.375
    kept = [own for _, own in expected]
    codes, own, not_finite = by_kernel(blocks, read, kept)
    again = [encoded(blocks, *pair) for pair in zip(read, kept, strict=True)]
    assert not not_finite.any()
    assert torch.equal(own[0], as_bytes(kept[0]))
    assert (own[1] != as_bytes(kept[1])).sum() == 1
    for number, (expected_codes, expected_scales) in enumerate(again):
        assert torch.equal(codes[number], expected_codes.flatten())
        assert torch.equal(own[number], as_bytes(expected_scales))


def numbers_that_are_not_finite_are_seen() -> None:
    codec, scales, powers = FORMATS["fp8 blocks"]
    blocks = Blocks(codec, SHAPE, (16, 16), torch.bfloat16, (torch.uint8, ()), scales, powers)
    values = [torch.ones(SHAPE, dtype=torch.bfloat16) for _ in range(3)]
    values[0][-1, -1] = torch.nan
    values[2][0, 17] = -torch.inf
    assert by_kernel(blocks, values, None)[2].tolist() == [1, 0, 1]


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # numpy sees the quotients of numbers that are masked out
    for case in itertools.product(FORMATS, (torch.bfloat16, torch.float32)):
        bits_are_those_of_the_codec(*case)
        print(*case, "right")
    numbers_that_are_not_finite_are_seen()
