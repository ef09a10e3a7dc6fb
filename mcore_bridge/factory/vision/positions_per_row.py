"""Positions of each row by itself, for a composite that numbers images over all rows of a batch.

HunYuan's fourth position is the number of an image in its sequence. transformers continues this count from row to row,
so a row would depend on earlier rows of its microbatch.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

WITH_NUMBER = 4
"""How many positions a token has if the last one is the number of its image."""


def take_rows_apart(composite: nn.Module) -> None:
    """Make transformers' ``get_rope_index`` of this composite compute the positions of one row at a time."""
    composite.get_rope_index = partial(_by_row, composite.get_rope_index)  # type: ignore[assignment]


def _by_row(
    positions_of: Any,
    input_ids: Tensor,
    mm_token_type_ids: Tensor,
    image_grid_thw: Tensor | None = None,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Like transformers' function: positions ``[n, b, s]``, and the offset of later positions ``[b, 1]``."""
    shown = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    is_image = (mm_token_type_ids == 1) & (shown != 0)
    begins = is_image & ~torch.nn.functional.pad(is_image, (1, 0))[:, :-1]
    ends = begins.sum(1).cumsum(0).tolist()
    ends[-1] = None  # transformers raises if some are left
    parts = []
    for row, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        one = slice(row, row + 1)
        grids = None if image_grid_thw is None else image_grid_thw[start:end]
        parts.append(positions_of(input_ids[one], mm_token_type_ids[one], grids, shown[one], **options))
    positions, lags = zip(*parts, strict=True)
    return torch.cat(positions, 1), torch.cat(lags)
