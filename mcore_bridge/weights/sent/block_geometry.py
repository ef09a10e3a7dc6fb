"""What shards have in common whose codes and scales one launch can make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mcore_bridge.rules.codec import Codec
from mcore_bridge.rules.trace import Shape
from mcore_bridge.weights.plan.boxes import RowSize
from mcore_bridge.weights.plan.encoded_entries import cells_of, upright_of
from mcore_bridge.weights.plan.inventory import EncodedPart, Role

_LARGEST = 1 << 15
"""Numbers of the largest block. A program of the kernel holds all of them in registers."""
_TILE = 1 << 12
"""Numbers that a program holds at once, if it need not hold more of a row."""
_UNIT = 8
"""Numbers that a thread loads and stores at once. Wider stores would have to pass codes between threads."""
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_E8M0 = getattr(torch, "float8_e8m0fnu", torch.float32)


@dataclass(frozen=True, slots=True)
class Blocks:
    """What the shards of a batch have in common.

    Attributes:
        codec: their codec.
        shape: rows and columns of a shard.
        cells: rows and columns of a block; the last block of a row or column may be smaller.
        dtype: the dtype of the numbers.
        codes: dtype and shape in which the codes of a shard are sent.
        scales: the dtype of the scales; for mxfp4, uint8 or e8m0.
        powers: whether new scales are powers of two.
    """

    codec: Codec
    shape: tuple[int, int]
    cells: tuple[int, int]
    dtype: torch.dtype
    codes: tuple[torch.dtype, Shape]
    scales: torch.dtype
    powers: bool

    @classmethod
    def of(cls, roles: Mapping[Role, EncodedPart]) -> Blocks | None:
        """The blocks of a weight that is sent so; None if ranks share a block, or the kernel does not know them."""
        part, codes = roles["scales"], roles["codes"]
        if part.shared or "overall" in roles:
            return None
        held, first = part.plain.held, part.encodings[0]
        height, width = cells_of(upright_of(part.plain.trace, first), first)
        rows, columns = held.shape
        blocks = cls(
            first.codec,
            (rows, columns),
            (min(height, rows), min(width, columns)),
            held.dtype,
            (first.codes.dtype, codes.trace.shard_shape),
            first.scales.dtype,
            first.powers,
        )
        return blocks if blocks._are_known else None

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the scales of a shard."""
        (rows, columns), (height, width) = self.shape, self.cells
        return -(-rows // height), -(-columns // width)

    @property
    def tile(self) -> tuple[int, int]:
        """Rows of a tile, and blocks in each row of it. A program of the kernel encodes one tile."""
        (rows, _), (height, width) = self.shape, map(_next_power_of_2, self.cells)
        if height > 1:
            return height, 1
        groups = max(1, min(_TILE // width, _next_power_of_2(self.grid[1])))
        return max(1, min(_TILE // (width * groups), _next_power_of_2(rows))), groups

    @property
    def tiles(self) -> tuple[int, int]:
        """Tiles of a shard: in a column, and in a row."""
        (down, across), (lines, groups) = self.grid, self.tile
        return -(-down // (1 if self.cells[0] > 1 else lines)), -(-across // groups)

    @property
    def row_size(self) -> RowSize:
        """The rows of the codes of a shard."""
        rows, per_byte = self.shape[0], self.codec.per_byte
        return RowSize(rows, self.shape[1] // per_byte, self.tile[1] * self.cells[1] // per_byte)

    @property
    def unit(self) -> int:
        """Numbers that a thread can load at once: a row has a multiple of them."""
        return _UNIT if self.shape[1] % _UNIT == 0 else 1

    @property
    def alike(self) -> tuple[object, ...]:
        """What shards must have in common so that one launch encodes them. Their shapes may differ."""
        return self.codec, self.cells, self.dtype, self.scales, self.powers, self.tile, self.unit

    @property
    def num_bytes(self) -> int:
        """Bytes of the codes of a shard."""
        return self.shape[0] * self.shape[1] // self.codec.per_byte

    @property
    def _are_known(self) -> bool:
        height, width = map(_next_power_of_2, self.cells)
        scales = (torch.uint8, _E8M0) if self.codec.kind == "mxfp4" else (*_FLOATS, _E8M0)
        is_known = self.codec.kind != "nvfp4" and self.dtype in _FLOATS and self.scales in scales
        return is_known and self.cells[1] % self.codec.per_byte == 0 and height * width <= _LARGEST


def _next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()
