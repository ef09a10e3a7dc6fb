"""Where an engine keeps the rows of encoded shards, so that a kernel writes codes there and no copy of them is made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mcore_bridge.weights.plan.boxes import WIDEST, ByteCopy
from mcore_bridge.weights.transfer.copier import Buffers, Numbers

Sizes = Mapping[int, tuple[int, int]]
"""Rows, and bytes of a row, of codes by their numbers."""
NOTHING: Sizes = MappingProxyType({})


class Rows(NamedTuple):
    """The places of the rows of one shard's codes."""

    tensors: Numbers
    """The engine's tensor of each row; -1 for a row that the engine does not use."""
    starts: Numbers
    """The byte of this tensor at which the row begins."""


@dataclass(frozen=True, eq=False)
class RowPlaces:
    """The places of all rows of some shards.

    Attributes:
        rows: by the number of a shard's codes.
        memory: the engine's tensors, all at multiples of ``WIDEST``.
        launches: what ``ShardEncoder`` keeps of launches into this memory.
    """

    rows: Mapping[int, Rows]
    memory: Buffers
    launches: dict[Any, Any] = field(default_factory=dict)

    def distances(self, numbers: Sequence[int], device: torch.device) -> Tensor:
        """Where the rows of these codes begin, on ``device``, int64 [rows].

        It is counted in ``WIDEST`` bytes from the beginning of the result; 0 for a row without a place.
        """
        tensors, starts = (np.concatenate(column) for column in zip(*map(self.rows.__getitem__, numbers), strict=True))
        result = torch.empty(len(tensors), dtype=torch.int64, device=device)
        distances = (self.memory.addresses[tensors] + starts - result.data_ptr()) // WIDEST
        return result.copy_(torch.from_numpy(np.where(tensors < 0, 0, distances)))


def rows_of(copies: Iterable[ByteCopy], num_rows: int, row_bytes: int) -> Rows | None:
    """The places to which ``copies`` bring the rows of codes [``num_rows``, ``row_bytes``].

    Returns:
        None if a row is copied in parts or more than once, or if its place is no multiple of ``WIDEST``.
    """
    tensors, starts = np.full(num_rows, -1, np.int64), np.zeros(num_rows, np.int64)
    for copy in copies:
        size, distance = copy.cols * copy.item, copy.source_row if copy.rows > 1 else 0
        is_run = copy.cols == 1 or copy.source_col == copy.target_col == copy.item
        if not is_run or any(number % row_bytes for number in (size, distance, copy.source_start)):
            return None
        run, within = np.arange(copy.rows)[:, None], np.arange(size // row_bytes)
        chosen = (copy.source_start + run * distance) // row_bytes + within
        if np.any(tensors[chosen] >= 0) or len(np.unique(chosen)) < chosen.size:
            return None
        tensors[chosen] = copy.target
        starts[chosen] = copy.target_start + run * copy.target_row + within * row_bytes
    return None if row_bytes % WIDEST or np.any(starts % WIDEST) else Rows(tensors, starts)
