"""Does on a CPU what the kernel that encodes shards does on a GPU, by the functions of the codec."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_bridge.rules.codec import as_bytes, codes_of, decoded, divided, new_scales, numbers_of, scales_of
from mcore_bridge.weights.engine import puller
from mcore_bridge.weights.sent import encode_tables, encoding
from mcore_bridge.weights.sent.encode_tables import Blocks, TileLaunch
from mcore_bridge.weights.sent.launches import ShardEncoder


def spread(blocks: Blocks, scales: Tensor) -> Tensor:
    """The factor of each number."""
    rows, columns = blocks.cells
    factors = scales_of(blocks.codec, scales).repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return factors[: blocks.shape[0], : blocks.shape[1]]


def largest(blocks: Blocks, numbers: Tensor) -> Tensor:
    """The largest number of each block."""
    (down, across), (rows, columns) = blocks.grid, blocks.cells
    padded = torch.zeros(down * rows, across * columns)
    padded[: numbers.shape[0], : numbers.shape[1]] = numbers
    return padded.view(down, rows, across, columns).amax((1, 3))


def values_of(blocks: Blocks, codes: Tensor, scales: Tensor) -> Tensor:
    """The numbers behind codes."""
    return decoded(blocks.codec, numbers_of(blocks.codec, codes), spread(blocks, scales), blocks.dtype)


def encoded(blocks: Blocks, values: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes and scales, for the whole tensor."""
    amax = largest(blocks, values.float().abs())
    scales = new_scales(blocks.codec, amax, blocks.scales, powers=blocks.powers)
    if kept is not None:
        codes = codes_of(blocks.codec, divided(blocks.codec, values, spread(blocks, kept)))
        changed = largest(blocks, (values_of(blocks, codes, kept) != values).float()) > 0
        scales = torch.where(changed, as_bytes(scales), as_bytes(kept)).view(blocks.scales)
    return codes_of(blocks.codec, divided(blocks.codec, values, spread(blocks, scales))), scales


def _memory(address: int, num_bytes: int) -> Tensor:
    return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)


def encode_tiles(
    blocks: Blocks,
    addresses: Tensor,
    table: Tensor,
    owners: Tensor,
    kept: Tensor | None,
    codes: Tensor,
    scales: Tensor,
    not_finite: Tensor,
    *,
    aligned: bool = False,
    places: Tensor | None = None,
    skips: bool = False,
) -> None:
    """As the function of this name, out of the same memory into the same memory."""
    tiles = [replace(blocks, shape=_shape(blocks, row)).tiles for row in table.tolist()]
    assert owners.bincount().tolist() == [down * across for down, across in tiles]
    for number, row in enumerate(table.tolist()):
        tensor, _, _, rows, _, down, across, at, scales_at, parts = row
        shape = _shape(blocks, row)
        own = replace(blocks, shape=shape)
        values = _memory(int(addresses[tensor]), rows * shape[1] * blocks.dtype.itemsize).view(blocks.dtype).view(shape)
        skipped = torch.zeros(down * across, dtype=torch.bool)
        if skips:
            assert places is not None
            of_parts = places[at:][: rows * parts].view(rows, parts).repeat_interleave(shape[1] // parts, 1)
            skipped = largest(own, of_parts.abs().float()).flatten() == 0
        if not largest(own, (~values.isfinite()).float()).flatten()[~skipped].eq(0).all():
            not_finite[number] = 1
        values = values.nan_to_num(0, 0, 0)
        grid = slice(scales_at, scales_at + down * across)
        made, stored = encoded(own, values, None if kept is None else kept[grid].view(blocks.scales).view(down, across))
        scales[grid] = as_bytes(stored).flatten()
        scales[grid][skipped] = 77  # whoever reads these scales finds it out
        lines = made.view(torch.uint8).view(rows * parts, -1)
        if places is None:
            codes[16 * at :][: lines.numel()] = lines.flatten()
            continue
        for line, place in zip(lines, places[at:].tolist(), strict=False):
            if place:
                _memory(codes.data_ptr() + 16 * place, len(line)).copy_(line)


def _shape(blocks: Blocks, row: list[int]) -> tuple[int, int]:
    return row[3], row[4] * blocks.unit


@contextmanager
def launches_on_cpu(*, is_done: bool = True) -> Iterator[list[set[int]]]:
    """Encode by launches in the block. Yields what each launch has made.

    Args:
        is_done: whether a launch says that it is done, if nobody waits for it.
    """
    made: list[set[int]] = []
    run = TileLaunch.run

    def note_run(launch: TileLaunch, *arguments: Any) -> Any:
        made.append({*launch.tables.numbers.tolist()})
        return run(launch, *arguments)

    def on_host(encoder: ShardEncoder, are_wrong: Tensor) -> tuple[Tensor, Any]:
        return are_wrong, SimpleNamespace(synchronize=lambda: None, query=lambda: is_done)

    with pytest.MonkeyPatch.context() as patched:
        for module in (encoding, puller):
            patched.setattr(module, "runs_kernel", lambda device: True)
        patched.setattr(torch.cuda, "device", lambda device: nullcontext())
        patched.setattr(TileLaunch, "run", note_run)
        patched.setattr(ShardEncoder, "_on_host", on_host)
        patched.setattr(encode_tables, "encode_tiles", encode_tiles)
        yield made
