"""The whole rows of a microbatch, from any form of its tokens, and the way from rows to the rank's tokens.

Models of images need whole rows: an image may lie on two context-parallel ranks, and positions depend on all tokens
before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mcore_bridge.batches.lengths import packed_lengths
from mcore_bridge.batches.packing import PackedSequences
from mcore_bridge.batches.padded_rows import lay_out_packed, lay_out_rows
from mcore_bridge.batches.text_collectives import gather

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class WholeRows:
    """The sequences of a microbatch, with the tokens of all context-parallel ranks.

    Attributes:
        input_ids: int64 ``[batch, seq]``.
        mask: bool ``[batch, seq]``: False at padding.
        in_text: int64 ``[rows, tokens]``: indices into the flattened rows; -1 for padding. For packed sequences it
            covers all tokens in the order of the text, otherwise the tokens of this rank.
        layout: where the tokens of each context-parallel rank are.
        group: the context-parallel group.
        given_whole: whether the caller gave whole rows, and not this rank's tokens.
    """

    input_ids: Tensor
    mask: Tensor
    in_text: Tensor
    layout: PackedSequences
    group: ProcessGroup
    given_whole: bool

    def own(self, values: Tensor) -> Tensor:
        """From values ``[batch, seq, ...]``, select this rank's tokens: ``[rows, tokens, ...]``, zero at padding."""
        return placed(values, self.layout.places[self.group.rank()])

    def ordered(self, values: Tensor) -> Tensor:
        """Select from values ``[batch, seq, ...]`` the values at ``in_text``."""
        return placed(values, self.in_text)

    def whole(self, values: Tensor) -> Tensor:
        """Further inputs as values ``[batch, seq, ...]``: a caller passes them for whole rows, or for its tokens."""
        if self.given_whole or values.shape[:2] == self.mask.shape:
            return values
        return spread(gather(values, self.group), self.layout)


def whole_rows(inputs: dict[str, Any], group: ProcessGroup) -> WholeRows:
    """The whole rows of a call. Every context-parallel rank calls it together.

    Args:
        inputs: the inputs of the model by name. With ``packed_seq_params``, padded rows and their mask, or the tokens
            of this rank in one row. Without them, rows: whole at ``cp=1``, or if they have a mask and no positions.
        group: the context-parallel group.

    Raises:
        BatchError: rows do not fit their parameters.
    """
    ids, mask, params = (inputs.get(name) for name in ("input_ids", "attention_mask", "packed_seq_params"))
    assert isinstance(ids, Tensor)
    cp, rank = group.size(), group.rank()
    shown = mask != 0 if isinstance(mask, Tensor) and mask.shape == ids.shape else None
    if params is None:
        given_whole = cp == 1 or (shown is not None and inputs.get("position_ids") is None)
        rows = ids if given_whole else ids.new_zeros(ids.size(0), ids.size(1) * cp)
        layout = lay_out_rows(rows, cp, rank)
        in_text = layout.places[rank]
    else:
        given_whole = shown is not None
        rows, shown = (ids, shown) if shown is not None else _empty(params, ids.device)
        layout = lay_out_packed(rows, shown, params, cp, rank)
        in_text = layout.places[0] if cp == 1 else lay_out_packed(rows, shown, params, 1, 0).places[0]
    if not given_whole:
        rows = spread(gather(ids, group), layout)
        if params is None and shown is not None:
            shown = spread(gather(shown, group), layout)
    shown = torch.ones_like(rows, dtype=torch.bool) if shown is None else shown
    return WholeRows(rows, shown, in_text, layout, group, given_whole)


def _empty(params: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """Empty rows for packed sequences: ids of zero ``[batch, longest]``, and the mask of their tokens."""
    # transformers needs at least one token
    lengths = torch.tensor(packed_lengths(params).tokens, device=device).clamp(min=1)
    mask = torch.arange(int(lengths.max()), device=device) < lengths[:, None]
    return torch.zeros_like(mask, dtype=torch.int64), mask


def placed(values: Tensor, places: Tensor) -> Tensor:
    """Values ``[batch, seq, ...]`` at ``places`` in the flattened rows; zero if the place is -1."""
    flat = values.flatten(0, 1)[places.clamp(min=0)]
    is_padding = (places < 0).view(*places.shape, *[1] * (flat.dim() - places.dim()))
    return flat.masked_fill(is_padding, 0)


def spread(values: Tensor, layout: PackedSequences) -> Tensor:
    """Values ``[cp, rows, tokens, ...]`` of all context-parallel ranks, as ``[batch, seq, ...]``."""
    has_place = layout.places >= 0
    rows = values.new_zeros(layout.shape[0] * layout.shape[1], *values.shape[3:])
    rows[layout.places[has_place]] = values[has_place]
    return rows.view(*layout.shape, *values.shape[3:])
