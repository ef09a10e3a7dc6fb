"""The length of each sequence of a microbatch: some rotary embeddings depend on the length of the sequence."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mcore_bridge.batches.text_collectives import reduce_max, reduce_sum

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from torch.distributed import ProcessGroup

_TOKENS = "bridge_lengths"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Sizes of the sequences of a microbatch, over all context-parallel ranks.

    Attributes:
        tokens: the number of tokens of each sequence, without padding; with images, its largest position plus 1.
        places: the number of tokens of each packed sequence, with padding. None: each sequence has a separate row.
    """

    tokens: tuple[int, ...]
    places: tuple[int, ...] | None = None


def with_lengths(params: PackedSeqParams, tokens: Sequence[int]) -> PackedSeqParams:
    """A copy of the parameters with the number of tokens of each sequence without padding.

    ``cu_seqlens_q`` cannot hold this: TransformerEngine would then choose other kernels.
    """
    known = copy.copy(params)
    setattr(known, _TOKENS, tuple(tokens))
    return known


def packed_lengths(params: PackedSeqParams) -> Lengths:
    """The lengths of packed sequences. Without ``with_lengths`` they come from ``cu_seqlens_q``."""
    starts = params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
    tokens = getattr(params, _TOKENS, None) or tuple(params.cu_seqlens_q.diff().tolist())
    return Lengths(tokens, tuple(starts.diff().tolist()))


def lengths_of(inputs: Mapping[str, Any], group: ProcessGroup) -> Lengths | None:
    """The lengths of a call of a chunk. Every context-parallel rank calls it together.

    Args:
        inputs: the inputs of the chunk by name, for the tokens of this rank. A row ends with its last token by
            ``attention_mask`` ``[b, s]``, or else by its largest position. Without either the result is None.
        group: the context-parallel group.
    """
    positions, mask = inputs.get("position_ids"), inputs.get("attention_mask")
    packed = inputs.get("packed_seq_params")
    of_images = positions if positions is not None and positions.dim() == 3 else None  # [n, b, s]
    if packed is not None:
        lengths = packed_lengths(packed)
        if of_images is None or lengths.places is None:
            return lengths
        return Lengths(tuple(int(part.max()) + 1 for part in of_images.split(lengths.places, 2)), lengths.places)
    if of_images is not None:
        return _last(of_images.amax((0, 2)), group)
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return Lengths(tuple(reduce_sum((mask != 0).sum(1), group).tolist()))
    return None if positions is None else _last(positions.amax(1), group)


def _last(positions: Tensor, group: ProcessGroup) -> Lengths:
    """The lengths of rows that end at these positions on this rank."""
    return Lengths(tuple(reduce_max(positions + 1, group).tolist()))
