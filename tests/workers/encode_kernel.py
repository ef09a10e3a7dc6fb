"""The kernel that encodes shards on GPUs, in Triton's interpreter on a CPU, against the functions of the codec.

It needs the path of the kernel, and ``TRITON_INTERPRET`` in its environment before Triton is imported.
"""

import importlib.util
import itertools
import sys
import warnings
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor

from mcore_bridge.rules.codec import Codec, as_bytes
from mcore_bridge.weights.plan.boxes import ByteCopy, rows_of
from mcore_bridge.weights.sent.encode_tables import Blocks
from mcore_bridge.weights.sent.launches import EncodeLaunch, KernelShard
from mcore_bridge.weights.transfer.copier import Buffers, RowPlaces
from tests.support.encode_on_cpu import encoded, values_of

E8M0 = getattr(torch, "float8_e8m0fnu", torch.uint8)
FORMATS = {
    "fp8 blocks": (Codec("fp8", (16, 16)), torch.float32, False),
    "fp8 blocks, bf16": (Codec("fp8", (12, 16)), torch.bfloat16, False),
    "fp8 blocks, powers": (Codec("fp8", (16, 32)), torch.float32, True),
    "fp8 blocks, e8m0": (Codec("fp8", (16, 16)), E8M0, True),
    "fp8 rows": (Codec("fp8", (1, 96), torch.bfloat16), torch.bfloat16, False),
    "mxfp4": (Codec("mxfp4", (1, 32)), torch.uint8, False),
    "mxfp4, e8m0": (Codec("mxfp4", (1, 32)), E8M0, True),
    "int4": (Codec("int4", (1, 32), torch.float16), torch.float16, False),
}
SHAPE, OTHER = (40, 96), (26, 96)


def module_of(path: str) -> ModuleType:
    """The module in a file."""
    spec = importlib.util.spec_from_file_location("kernel", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sys.modules["mcore_bridge.weights.sent.triton_encode"] = module_of(sys.argv[1])
torch.cuda.device = lambda device: nullcontext()


def by_kernel(
    shards: list[Blocks],
    values: list[Tensor],
    kept: list[Tensor] | None,
    places: RowPlaces | None = None,
    *,
    skips: bool = False,
) -> tuple[list[Tensor], Tensor]:
    """The codes and scales of several shards in turn, and whether numbers are not finite."""
    trace = SimpleNamespace(shard=lambda shard, grids, dtype: grids[0])
    names = [f"w{number}" for number in range(len(shards))]
    parts = [SimpleNamespace(parts=(0,), plain=SimpleNamespace(hf=(n,)), shared=False, trace=trace) for n in names]
    files = {n: SimpleNamespace(scales=own) for n, own in zip(names, kept or (), strict=kept is not None)}
    launch = EncodeLaunch(
        [KernelShard(own, parts[n], 0, 2 * n, 2 * n + 1) for n, own in enumerate(shards)],
        None if places is None else places.rows,
        skips=skips,
    )
    held = Buffers([values[number // 2] for number in range(2 * len(values))])
    memory = None if places is None else places.memory
    made, are_wrong = launch.run(held, SimpleNamespace(files=files), torch.device("cpu"), memory)
    assert places or made.addresses.tolist() == [tensor.data_ptr() for tensor in made.tensors()]
    return [*made.tensors()], are_wrong


def bits_are_those_of_the_codec(name: str, dtype: torch.dtype) -> None:
    codec, scales, powers = FORMATS[name]
    shards = []
    for shape in (SHAPE, SHAPE, OTHER):
        blocks = Blocks(codec, shape, (codec.block[0], codec.block[1]), dtype, (torch.uint8, (-1,)), scales, powers)
        shards.append(blocks)
    generator = torch.Generator().manual_seed(0)
    values = []
    for blocks in shards:
        spreads = torch.exp2(torch.randint(-12, 1, (blocks.shape[0], 1), generator=generator).float())
        values.append((torch.randn(blocks.shape, generator=generator) * spreads).to(dtype))
    values[0][:16] = 0
    values[0][:9:2, ::3] = -0.0
    expected = [encoded(*pair, None) for pair in zip(shards, values, strict=True)]
    found = by_kernel(shards, values, None)[0]
    for number, (codes, own) in enumerate(expected):
        assert torch.equal(found[2 * number], codes.flatten())
        assert torch.equal(as_bytes(found[2 * number + 1]), as_bytes(own))

    if dtype == torch.bfloat16:
        rows_go_to_their_places(shards, values, expected)
    read = [values_of(blocks, *pair) for blocks, pair in zip(shards, expected, strict=True)]
    read[1][[12, -1], [3, -1]] = read[1].abs().max() * 1.375  # in and behind the first rows of their blocks
    kept = [own for _, own in expected]
    found, not_finite = by_kernel(shards, read, kept)
    again = [encoded(*each) for each in zip(shards, read, kept, strict=True)]
    assert not not_finite.any()
    assert torch.equal(as_bytes(found[1]), as_bytes(kept[0]))
    assert not torch.equal(as_bytes(found[3]), as_bytes(kept[1]))
    for number, (codes, own) in enumerate(again):
        assert torch.equal(found[2 * number], codes.flatten())
        assert torch.equal(as_bytes(found[2 * number + 1]), as_bytes(own))


def rows_go_to_their_places(shards: list[Blocks], values: list[Tensor], expected: list[tuple[Tensor, Tensor]]) -> None:
    """Rows of codes in an engine's two tensors: in another order, behind other bytes, and some of them nowhere.

    The rows of the second shard are cut into parts, if blocks allow it. The parts come in another order, and the last
    one goes nowhere.
    """
    wide = expected[0][0].shape[1] + 16
    memory = [torch.full((sum(len(codes) for codes, _ in expected) * wide + 48,), 7, dtype=torch.uint8) for _ in "ab"]
    wanted, places, line = [own.clone() for own in memory], {}, 0
    for number, (blocks, (codes, _)) in enumerate(zip(shards, expected, strict=True)):
        size, rows, width = blocks.row_size, *codes.shape
        last = 32 + (line + rows - 1) * wide  # the last row comes first
        copies = [
            ByteCopy(0, 2 * width, number % 2, last - 2 * wide, 5, width, 1, width, 1, -wide, 1),
            ByteCopy(0, 9 * width, number % 2, last - 9 * wide, rows - 9, width // 2, 2, width, 2, -wide, 2),
        ]
        part = max(32, size.tile_bytes)
        if is_cut := number == 1 and width > part:
            copies = [
                own._replace(
                    cols=part // own.item,
                    source_start=own.source_start + near,
                    target_start=own.target_start + width - near - part,
                )
                for own in copies
                for near in range(0, width - part, part)
            ]
        for row in (*range(2, 7), *range(9, rows)):
            if is_cut:
                turned = codes[row].view(-1, part)[:-1].flip(0).flatten()
                wanted[number % 2][last - row * wide + part :][: len(turned)] = turned
            else:
                wanted[number % 2][last - row * wide :][:width] = codes[row]
        found = rows_of(copies, size)
        assert found is not None
        assert found.starts.shape == (rows, width // part if is_cut else 1)
        places[2 * number] = found
        assert rows_of([*copies, copies[0]], size) is None
        assert rows_of([copies[0]._replace(cols=1, item=width - 1)], size) is None
        assert rows_of([copies[0]._replace(target_start=last + 8)], size) is None
        assert not is_cut or rows_of(copies, size._replace(tile_bytes=2 * part)) is None
        line += rows
    before = [own.clone() for own in memory]
    for skips in (False, True):
        for own, old in zip(memory, before, strict=True):
            own.copy_(old)
        found_scales, _ = by_kernel(shards, values, None, RowPlaces(places, Buffers(memory)), skips=skips)
        assert all(map(torch.equal, memory, wanted))
        for number, (_, own) in enumerate(expected):
            made = as_bytes(found_scales[2 * number + 1])
            are_placed = torch.from_numpy(shards[number].have_places(places[2 * number]))
            assert torch.equal(made[are_placed], as_bytes(own)[are_placed])
            assert skips or torch.equal(made, as_bytes(own))


def long_rows_are_cut_between_tiles() -> None:
    """Rows of four-bit codes, two of which are in a byte; a tile has many blocks of a row."""
    codec, scales, powers = FORMATS["mxfp4"]
    blocks = Blocks(codec, (12, 8192), (1, 32), torch.bfloat16, (torch.uint8, (-1,)), scales, powers)
    values = [torch.randn(blocks.shape, dtype=torch.bfloat16) for _ in range(2)]
    assert blocks.row_size == (12, 4096, 2048)
    rows_go_to_their_places([blocks] * 2, values, [encoded(blocks, own, None) for own in values])


def numbers_that_are_not_finite_are_seen() -> None:
    codec, scales, powers = FORMATS["fp8 blocks"]
    blocks = Blocks(codec, SHAPE, (16, 16), torch.bfloat16, (torch.uint8, (-1,)), scales, powers)
    values = [torch.ones(SHAPE, dtype=torch.bfloat16) for _ in range(3)]
    values[0][-1, -1] = torch.nan
    values[2][0, 17] = -torch.inf
    assert by_kernel([blocks] * 3, values, None)[1].tolist() == [1, 0, 1]


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # numpy sees the quotients of numbers that are masked out
    for case in itertools.product(FORMATS, (torch.bfloat16, torch.float32)):
        bits_are_those_of_the_codec(*case)
        print(*case, "right")
    numbers_that_are_not_finite_are_seen()
    long_rows_are_cut_between_tiles()
