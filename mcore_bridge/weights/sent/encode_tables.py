"""A launch of the kernel that encodes shards, and what the kernel needs to know of them.

These are plain tables. So another process can launch the kernel, too, if it has opened the memory of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from mcore_bridge.rules.codec import MOST, Codec, as_bytes, smallest_scale
from mcore_bridge.rules.spec import ALIGNMENT
from mcore_bridge.weights.plan.boxes import WIDEST, Numbers, Rows, RowSize
from mcore_bridge.weights.transfer.copier import Buffers, Made, beside_peers, distances

COLUMNS = (
    *("tensor", "first_tile", "tiles_in_a_row", "rows", "units", "grid_rows", "grid_columns"),
    *("codes", "scales", "parts_of_a_row"),
)
"""What the kernel needs to know of each shard; codes begin at a multiple of 16 bytes, and scales at an element."""
_FEW_BYTES, _SHARE = 1 << 22, 256
"""Scales of files for a launch stay on the GPU between exports if they are few bytes, or a small share of the codes."""
_LARGEST = 1 << 15
"""Numbers of the largest block. A program of the kernel holds all of them in registers."""
_TILE = 1 << 12
"""Numbers that a program holds at once, if it need not hold more of a row."""
_UNIT = 8
"""Numbers that a thread loads and stores at once. Wider stores would have to pass codes between threads."""
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_E8M0 = getattr(torch, "float8_e8m0fnu", torch.float32)
_KINDS = {"fp8": 0, "mxfp4": 1, "int4": 2}
_FEW = 8
"""The first rows of a block that are checked for changes before all rows are."""


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
    codes: tuple[torch.dtype, tuple[int, ...]]
    scales: torch.dtype
    powers: bool

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

    def have_places(self, rows: Rows) -> Any:
        """Which blocks of a shard have any place, if these are the places of its rows; bool [grid]."""
        lines = np.logical_or.reduceat(rows.tensors >= 0, np.arange(0, self.shape[0], self.cells[0]), axis=0)
        firsts = np.arange(self.grid[1]) * self.cells[1]
        return lines[:, firsts // -(-self.shape[1] // lines.shape[1])]

    @property
    def are_known(self) -> bool:
        """Whether the kernel can encode them."""
        height, width = map(_next_power_of_2, self.cells)
        scales = (torch.uint8, _E8M0) if self.codec.kind == "mxfp4" else (*_FLOATS, _E8M0)
        is_known = self.codec.kind != "nvfp4" and self.dtype in _FLOATS and self.scales in scales
        return is_known and self.cells[1] % self.codec.per_byte == 0 and height * width <= _LARGEST


class ToEncode(Protocol):
    """A shard that the kernel can encode."""

    @property
    def blocks(self) -> Blocks:
        """Its blocks."""

    @property
    def codes(self) -> int:
        """The number of its codes among the tensors of an export. The numbers of the shard are in this tensor."""

    @property
    def scales(self) -> int:
        """The number of its scales."""


@dataclass(frozen=True, eq=False)
class EncodeTables:
    """Shards that one launch encodes.

    Codes are in one buffer, and scales in another one. All begin at addresses that suit the copies of an export.

    Attributes:
        blocks: the blocks of one of the shards; ``alike`` is equal for all.
        numbers: the numbers of the codes and of the scales of each shard, int64 [2 * shards].
        offsets: where they begin in the two buffers, in bytes, int64 [shards, 2].
        sizes: the bytes of all codes, and the elements of all scales.
        shards: a row of ``COLUMNS`` for each shard, int32 [shards, columns].
        tiles: the tiles of each shard, int64 [shards].
        rows: the places of the rows of all shards, if codes are written there; else None.
        skips: whether tiles without a place are left out, with their scales.
    """

    blocks: Blocks
    numbers: Numbers
    offsets: Any
    sizes: tuple[int, int]
    shards: Any
    tiles: Numbers
    rows: Rows | None
    skips: bool

    @classmethod
    def of(cls, shards: Sequence[ToEncode], places: Mapping[int, Rows] | None, *, skips: bool = False) -> EncodeTables:
        """The tables of shards that are alike.

        Args:
            places: the places of the rows of their codes, if codes are written there.
            skips: whether to leave out tiles without a place, with their scales.
        """
        item = shards[0].blocks.scales.itemsize
        codes_at, scales_at = (
            [*accumulate((-(-size // unit) * unit for size in sizes), initial=0)]
            for sizes, unit in (
                ([shard.blocks.num_bytes for shard in shards], ALIGNMENT),
                ([_area(shard.blocks.grid) for shard in shards], max(1, WIDEST // item)),
            )
        )
        first, tiles, table, line, parts, rows = 0, [], [], 0, 1, []
        for shard, own_codes, own_scales in zip(shards, codes_at, scales_at, strict=False):
            of = shard.blocks
            units, at = of.shape[1] // of.unit, own_codes // WIDEST
            if places is not None:
                rows.append(places[shard.codes])
                at, parts = line, rows[-1].starts.shape[1]
            table.append((shard.codes, first, of.tiles[1], of.shape[0], units, *of.grid, at, own_scales, parts))
            first, line = first + _area(of.tiles), line + of.shape[0] * parts
            tiles.append(_area(of.tiles))
        return cls(
            shards[0].blocks,
            np.array([number for shard in shards for number in (shard.codes, shard.scales)], dtype=np.int64),
            np.array([codes_at[:-1], [item * start for start in scales_at[:-1]]], dtype=np.int64).T,
            (codes_at[-1], scales_at[-1]),
            np.array(table, dtype=np.int32),
            np.array(tiles, dtype=np.int64),
            _joined(rows) if rows else None,
            skips,
        )

    def keeps(self, scales: Tensor) -> bool:
        """Whether scales of files stay on a GPU between exports."""
        return scales.nbytes <= max(_FEW_BYTES, self.sizes[0] // _SHARE)

    def views(self, made: EncodedTiles) -> Iterator[tuple[Tensor, Tensor]]:
        """The codes of each shard, uint8 [bytes] (none if their rows have places), and its scales [rows, columns]."""
        of, item = self.blocks, self.blocks.scales.itemsize
        for (codes_at, scales_at), row in zip(self.offsets.tolist(), self.shards.tolist(), strict=True):
            _, _, _, rows, units, down, across, *_ = row
            num_bytes = 0 if self.rows is not None else rows * units * of.unit // of.codec.per_byte
            start = scales_at // item
            scales = made.scales[start : start + down * across].view(down, across)
            yield made.codes[codes_at : codes_at + num_bytes], scales


class EncodedTiles(NamedTuple):
    """What a launch has made.

    Attributes:
        codes: the codes of all shards, uint8 [bytes]; if their rows have places, some memory without them.
        scales: their scales, in the dtype in which they are sent.
        addresses: the addresses of the codes and of the scales of each shard, int64 [2 * shards]. Those of codes are 0
            if their rows have places.
        are_wrong: 1 for each shard with a number that is not finite, int32 [shards].
    """

    codes: Tensor
    scales: Tensor
    addresses: Numbers
    are_wrong: Tensor


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
    """Encode shards, on the current stream of the device of ``codes``.

    Args:
        blocks: the blocks of one of the shards; ``alike`` is equal for all.
        addresses: where the numbers of tensors are, int64 [tensors]. Each tensor is contiguous.
        table: a row of ``COLUMNS`` for each shard, int32 [shards, columns].
        owners: the shard of each tile, int32 [tiles].
        kept: scales of files, in the places of ``scales``. A block keeps its scale if this reproduces all numbers.
            None: all scales are new.
        codes: where to write codes, uint8 [bytes].
        scales: where to write scales; as uint8 if they have one byte.
        not_finite: where to write 1 for shards with NaN or infinity, int32 [shards].
        aligned: whether all addresses are multiples of 16.
        places: where to write each part of a row of codes instead, int64 [parts of rows of all shards]. A number counts
            16 bytes from the beginning of ``codes``, and a part with 0 is not written. The table has the first of them
            of each shard.
        skips: whether to make nothing of a tile without a place, not even scales.
    """
    from mcore_bridge.weights.sent.triton_encode import FLOATS, encode  # only GPUs need Triton

    height, width = blocks.cells
    lines, groups = blocks.tile
    encode[(len(owners),)](
        addresses, table, owners, scales if kept is None else kept, codes, codes if places is None else places, scales,
        not_finite,
        float(MOST[blocks.codec.kind]), 0.0 if scales.dtype == torch.uint8 else smallest_scale(blocks.scales),
        COLUMNS=table.shape[1], HEIGHT=height, WIDTH=width, VALUE=FLOATS[blocks.dtype],
        KIND=_KINDS[blocks.codec.kind], KEPT=kept is not None, POWERS=blocks.powers,
        ROUND=FLOATS[blocks.codec.rounded_to or torch.float32], LINES=lines, GROUPS=groups,
        WIDE=_next_power_of_2(width), FEW=min(lines, _FEW), UNIT=blocks.unit, ALIGNED=aligned, CUDA=codes.is_cuda,
        FP8=codes.is_cuda and torch.cuda.get_device_capability(codes.device) >= (8, 9), PLACED=places is not None,
        SKIPS=skips, num_warps=4,
    )  # fmt: skip


class TileLaunch:
    """Encodes the shards of its tables. What it needs on a GPU stays there between exports."""

    def __init__(self, tables: EncodeTables) -> None:
        self.tables = tables
        self._shards: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._places: tuple[Numbers, Tensor] | None = None
        self._kept: tuple[object, Tensor] | None = None

    def _tables_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The table of shards, and the shard of each tile, int32 [tiles]."""
        if device not in self._shards:
            tiles = self.tables.tiles
            owners = torch.from_numpy(np.repeat(np.arange(len(tiles), dtype=np.int32), tiles))
            self._shards[device] = torch.from_numpy(self.tables.shards).to(device), owners.to(device)
        return self._shards[device]

    def _places_in(self, memory: Buffers | None, device: torch.device) -> Tensor | None:
        """Where each part of a row of codes belongs in this memory, if it does; see ``distances``."""
        if self.tables.rows is None or memory is None:
            return None
        if self._places is None or not np.array_equal(self._places[0], memory.addresses):
            self._places = memory.addresses, distances(self.tables.rows, memory, device)
        return self._places[1]

    def scales_of_files(self, form: object, read: Callable[[], Tensor | None], device: torch.device) -> Tensor | None:
        """The scales of files on a GPU, which ``read`` returns. They stay there for this form if ``keeps`` says so."""
        if self._kept is not None and self._kept[0] is form and self._kept[1].device == device:
            return self._kept[1]
        if (scales := read()) is None:
            return None
        own = scales.to(device)
        self._kept = (form, own) if self.tables.keeps(own) else None
        return own

    def run(self, held: Buffers, kept: Tensor | None, device: torch.device, memory: Buffers | None) -> EncodedTiles:
        """Encode the shards.

        Args:
            held: the tensors of an export, with the numbers of a shard at the number of its codes.
            kept: the scales of files, in the places of the scales that are made; None if there are none.
            device: the GPU of the tensors.
            memory: the tensors in which rows have places, if they have any.
        """
        tables, (shards, owners) = self.tables, self._tables_on(device)
        places = self._places_in(memory, device)
        if places is None:
            codes = torch.empty(tables.sizes[0], dtype=torch.uint8, device=device)
        else:
            codes = places.view(torch.uint8)
        scales = torch.empty(tables.sizes[1], dtype=tables.blocks.scales, device=device)
        are_wrong = torch.zeros(len(tables.shards), dtype=torch.int32, device=device)
        with torch.cuda.device(device), beside_peers(device, frozenset() if memory is None else memory.gpus):
            encode_tiles(
                tables.blocks,
                held.addresses_on(device),
                shards,
                owners,
                kept,
                codes,
                as_bytes(scales),
                are_wrong,
                aligned=held.is_aligned,
                places=places,
                skips=tables.skips,
            )
        addresses = tables.offsets + np.array([codes.data_ptr(), scales.data_ptr()])
        if places is not None:
            addresses[:, 0] = 0
        return EncodedTiles(codes, scales, addresses.ravel(), are_wrong)


class PlacedEncoder:
    """Encodes weights whose codes all have places in an engine's memory. It can be sent to the engine's process.

    Args:
        tables: the tables of its launches.
        kept: for each launch the bytes of the scales of files, as they are stored; None if there are none.
    """

    def __init__(self, tables: Sequence[EncodeTables], kept: Sequence[Any]) -> None:
        self._tables, self._kept = tuple(tables), tuple(kept)
        self._launches = [*map(TileLaunch, self._tables)]
        self._are_wrong: list[Tensor] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return PlacedEncoder, (self._tables, self._kept)

    @property
    def numbers(self) -> frozenset[int]:
        """See ``PlacedMaker``."""
        return frozenset(chain.from_iterable(tables.numbers.tolist() for tables in self._tables))

    def make(self, held: Buffers, memory: Buffers, device: torch.device) -> list[Made]:
        """Write all codes to their places, without waiting for it.

        Args:
            held: the tensors of an export, with the numbers of a shard at the number of its codes.
            memory: the tensors of the engine.
            device: where the kernel runs.

        Returns:
            The scales. Codes are replaced by nothing.
        """
        self._are_wrong, made = [], []
        for launch, of_files in zip(self._launches, self._kept, strict=True):
            kept = launch.scales_of_files(self, partial(_stored, launch.tables.blocks.scales, of_files), device)
            result = launch.run(held, kept, device, memory)
            self._are_wrong.append(result.are_wrong)
            made.append(Made(launch.tables.numbers, result.addresses, partial(_in_turn, launch.tables, result)))
        return made

    def wrong(self) -> tuple[int, int] | None:
        """A launch, and its shard with a number that is not finite, after a wait for all launches; None if none has."""
        flags = (are_wrong.nonzero() for are_wrong in self._are_wrong)
        return next(((number, int(wrong[0])) for number, wrong in enumerate(flags) if wrong.numel()), None)


def _joined(rows: Sequence[Rows]) -> Rows:
    """All parts of all rows in one line."""
    return Rows(*(np.concatenate([*map(np.ravel, column)]) for column in zip(*rows, strict=True)))


def _stored(dtype: torch.dtype, octets: Any) -> Tensor | None:
    """Scales of their bytes, ``as_bytes``; None if there are none."""
    return None if octets is None else as_bytes(torch.from_numpy(octets).view(dtype))


def _in_turn(tables: EncodeTables, made: EncodedTiles) -> list[Tensor]:
    return [*chain.from_iterable(tables.views(made))]


def _area(sizes: tuple[int, int]) -> int:
    rows, columns = sizes
    return rows * columns


def _next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()
