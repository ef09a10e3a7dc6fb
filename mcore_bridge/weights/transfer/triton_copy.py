"""The kernel behind ``CopyTable.run``: all copies of a table in one launch, each cut into tiles of some KB.

Tiles of one size keep all multiprocessors busy, with three large copies or with three thousand small ones. A program
finds its copy by bisection in the cumulative number of tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_bridge.weights.plan.boxes import WIDEST, ByteCopy, Table

_TILE, _NARROW = (16, 256), (128, 32)  # rows and columns, in words
_WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """The copies of one word size, on the GPU; only the addresses of buffers are missing."""

    word: int
    wide: bool
    tile: tuple[int, int]
    table: Tensor
    """The input of the kernel, int64 [11, copies]. Its rows are: source buffer, first byte in it, target buffer, first
    byte in it, rows, columns, strides of rows and of columns (source, target; in words), last tile.
    """
    num_tiles: int


def prepare(copies: Table, *, aligned: bool, device: torch.device) -> tuple[Launch, ...]:
    """Sort copies by the size of the words in which they can be copied.

    Args:
        copies: fields of ``ByteCopy``.
        aligned: whether all buffers begin at multiples of ``WIDEST``, so that words of half this size can be used.
        device: where the kernel will run.
    """
    column = dict(zip(ByteCopy._fields, copies.T, strict=True))
    item, rows, run = column["item"], column["rows"], column["cols"] * column["item"]
    several = rows > 1
    places = [column["source_start"], column["target_start"], run]
    places += [column["source_row"] * several, column["target_row"] * several]
    dense = (column["source_col"] == item) & (column["target_col"] == item)
    wide = dense & (np.stack(places) % WIDEST == 0).all(0) & aligned
    narrow = wide & (rows >= _NARROW[0]) & (run < _TILE[1] * 8)
    groups = [
        (_in_rows(copies[wide & ~narrow]), 8, True, _TILE),
        (copies[narrow], 8, True, _NARROW),
        *((copies[~wide & (item == word)], word, False, _TILE) for word in _WORDS),
    ]
    return tuple(_launch(*group, device) for group in groups if len(group[0]))


def _launch(copies: Table, word: int, wide: bool, tile: tuple[int, int], device: torch.device) -> Launch:
    column = dict(zip(ByteCopy._fields, copies.T, strict=True))
    cols = column["cols"] * column["item"] // word
    strides = [column[name] // word for name in ("source_row", "target_row", "source_col", "target_col")]
    tiles = (-(-column["rows"] // tile[0]) * -(-cols // tile[1])).cumsum()
    places = [column[name] for name in ("source", "source_start", "target", "target_start", "rows")]
    table = torch.from_numpy(np.stack([*places, cols, *strides, tiles]))
    return Launch(word, wide, tile, table.to(device), int(tiles[-1]))


def _in_rows(copies: Table) -> Table:
    """Cut copies of few long rows into copies of many rows that are as wide as a tile."""
    width = _TILE[1] * 8
    tables = [copies[copies[:, 4] >= _TILE[0]]]
    few = copies[copies[:, 4] < _TILE[0]]
    number = np.concatenate([np.arange(rows) for rows in few[:, 4]] or [np.arange(0)])
    few = few.repeat(few[:, 4], axis=0)
    few[:, 1] += number * few[:, 7]
    few[:, 3] += number * few[:, 9]
    run = few[:, 5] * few[:, 6]
    for rows, cols, offset in ((run // width, width, 0), (np.ones_like(run), run % width, run // width * width)):
        part = few.copy()
        part[:, 1] += offset
        part[:, 3] += offset
        part[:, 4], part[:, 5], part[:, 6] = rows, cols, 1
        part[:, 7:] = (width, 1, width, 1)
        tables.append(part[(part[:, 4] > 0) & (part[:, 5] > 0)])
    return np.concatenate(tables)


def launch(launches: Sequence[Launch], staying: Tensor, passing: Tensor) -> None:
    """Copy between buffers at these addresses (int64 [buffers], on the GPU), on its current stream."""
    for part in launches:
        sizes = (part.table.shape[1], len(staying))
        _copy[(part.num_tiles,)](part.table, staying, passing, *sizes, _WORDS[part.word], part.wide, *part.tile)


@triton.jit(do_not_specialize=["count", "num_staying"])  # type: ignore[untyped-decorator]
def _copy(table, staying, passing, count, num_staying, WORD: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: E501, N803  # fmt: skip
    tile = tl.program_id(0)
    ends = table + 10 * count
    low, high = 0, count - 1
    while low < high:
        middle = (low + high) // 2
        beyond = tl.load(ends + middle) <= tile
        low = tl.where(beyond, middle + 1, low)
        high = tl.where(beyond, high, middle)
    inside = tile - tl.load(ends + low - 1, mask=low > 0, other=0)
    source = tl.load(table + low)
    target = tl.load(table + 2 * count + low)
    source = tl.load(tl.where(source < num_staying, staying + source, passing + source - num_staying))
    target = tl.load(tl.where(target < num_staying, staying + target, passing + target - num_staying))
    source = (source + tl.load(table + count + low)).to(tl.pointer_type(WORD))
    target = (target + tl.load(table + 3 * count + low)).to(tl.pointer_type(WORD))
    rows = tl.load(table + 4 * count + low)
    cols = tl.load(table + 5 * count + low)
    source_row = tl.load(table + 6 * count + low)
    target_row = tl.load(table + 7 * count + low)
    across = tl.cdiv(cols, COLS)
    row = (inside // across * ROWS + tl.arange(0, ROWS))[:, None]
    col = (inside % across * COLS + tl.arange(0, COLS))[None, :]
    if WIDE:
        source, target = tl.multiple_of(source, 16), tl.multiple_of(target, 16)
        source_row, target_row = tl.multiple_of(source_row, 2), tl.multiple_of(target_row, 2)
        cols = tl.multiple_of(cols, 2)
        there = (row < rows) & (col < cols)
        words = tl.load(source + row * source_row + col, mask=there)
        tl.store(target + row * target_row + col, words, mask=there)
    else:
        source_col = tl.load(table + 8 * count + low)
        target_col = tl.load(table + 9 * count + low)
        there = (row < rows) & (col < cols)
        words = tl.load(source + row * source_row + col * source_col, mask=there)
        tl.store(target + row * target_row + col * target_col, words, mask=there)
