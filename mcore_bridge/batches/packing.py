"""Sequences of a padded batch as a context-parallel rank runs them: packed one behind the other, or a row for each.

Every sequence is cut into ``2 * cp`` chunks, of which rank r has the chunks r and 2cp-1-r, as megatron-core and
TransformerEngine deal them. What follows a token is known before anything is cut, so that labels are right where chunks
meet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mcore_bridge.config.mesh.parallel_dims import ParallelDims
from mcore_bridge.errors import BatchError

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams


SHORT = 512
"""Tokens of a sequence of padding, where no other is longer."""


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """What one context-parallel rank gives to a model, and where it belongs in the batch that it was made from.

    Attributes:
        input_ids: int64 ``[rows, tokens]``; one row where sequences are packed.
        position_ids: int64, likewise: the place of a token in its own sequence.
        labels: int64, likewise: the token that follows in the same sequence; 0 where none does.
        loss_mask: bool, likewise: whether one does.
        places: int64 ``[cp, rows, tokens]``: where every context-parallel rank's tokens are in the flattened batch; -1
            for padding.
        following: int64, likewise: where the tokens that follow them are; -1 where none does.
        shape: of the batch, ``(batch, seq)``.
        packed_seq_params: what ``GPTModel`` takes with packed sequences; None with a row for each.
    """

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    loss_mask: Tensor
    places: Tensor
    following: Tensor
    shape: tuple[int, int]
    packed_seq_params: PackedSeqParams | None

    @property
    def num_tokens(self) -> int:
        """Tokens of a row on all context-parallel ranks together, with padding."""
        return self.places.size(0) * self.places.size(2)


def pack_sequences(
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    dims: ParallelDims | None = None,
    cp_rank: int = 0,
    packed: bool = True,
    multiple_of: int = 1,
    min_tokens: int = 0,
) -> PackedSequences:
    """Pack the sequences of a batch, without its padding, and take what one context-parallel rank has of them.

    Each sequence is padded to what context parallelism needs, and all of them together, by more sequences, to what
    sequence parallelism does.

    Args:
        input_ids: int64 ``[batch, seq]``, on any device.
        attention_mask: ``[batch, seq]``, 1 or True where a token counts and 0 elsewhere: padding may be left, right, or
            in between. None is everywhere.
        dims: the mesh, of which ``tp``, ``cp`` and ``sp`` count.
        cp_rank: whose tokens to take.
        packed: False gives each sequence a row of its own, padded on the right to the longest: for models that take no
            packed sequences.
        multiple_of: what the tokens on one rank must be a multiple of: 16 for FP8, 128 for its blockwise recipe.
        min_tokens: of a row at least, on all context-parallel ranks together, so that microbatches are alike.

    Raises:
        BatchError: shapes do not fit, there is no token, or ``cp_rank`` is no rank of the mesh.
    """
    dims = dims or ParallelDims()
    if input_ids.dim() != 2 or (attention_mask is not None and attention_mask.shape != input_ids.shape):
        shapes = [tuple(input_ids.shape), attention_mask if attention_mask is None else tuple(attention_mask.shape)]
        raise BatchError(f"input_ids and attention_mask must both be [batch, seq], found {shapes}")
    if attention_mask is not None:
        require_mask(attention_mask)
    if not input_ids.numel():
        raise BatchError(f"input_ids must be [batch, seq] with at least one token, found {tuple(input_ids.shape)}")
    if not 0 <= cp_rank < dims.cp:
        raise BatchError(f"cp_rank must be 0 to {dims.cp - 1} at cp={dims.cp}, found {cp_rank}")
    each = 2 * dims.cp if dims.cp > 1 else 1
    row = math.lcm(each, dims.cp * (dims.tp if dims.sp else 1) * multiple_of)
    mask = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask != 0
    lengths = mask.sum(1).tolist()
    if packed:
        sizes = [rounded_up(length, each) for length in lengths]
        whole = max(rounded_up(sum(sizes), row), rounded_up(min_tokens, row), row)
        sizes += _stretches(whole - sum(sizes), max(sizes, default=0))
    else:
        sizes = [max(rounded_up(max(lengths, default=0), row), rounded_up(min_tokens, row), row)] * len(lengths)
    rows = 1 if packed else len(lengths)
    return _cut(input_ids, mask, lengths, sizes, rows, dims.cp, cp_rank)


def require_mask(attention_mask: Tensor) -> None:
    """Refuse what is no mask of ones and zeros: one that is added to scores, 0 and -1e9, would be read inverted."""
    if attention_mask.dtype == torch.bool or bool(((attention_mask == 0) | (attention_mask == 1)).all()):
        return
    low, high = attention_mask.aminmax()
    raise BatchError(
        f"attention_mask must be 1 or True where a token counts and 0 elsewhere, found {attention_mask.dtype} from "
        f"{low.item()} to {high.item()}: of a mask that is added to scores pass mask == 0; where it numbers sequences "
        "in a row, give each sequence a row of its own"
    )


def _stretches(num_tokens: int, longest: int) -> list[int]:
    """Padding as sequences that are no longer than the longest that is there, which a rope may go by; at least one.

    Nor so short that there are very many: no rope goes by as few tokens as ``SHORT``.
    """
    size = max(longest, SHORT)
    whole, rest = divmod(num_tokens, size)
    return [*[size] * whole, rest]


def rounded_up(number: int, unit: int) -> int:
    """The least multiple of ``unit`` that is not below ``number``."""
    return -(-number // unit) * unit


def _cut(
    input_ids: Tensor, mask: Tensor, lengths: list[int], sizes: list[int], rows: int, cp: int, cp_rank: int
) -> PackedSequences:
    """Lay sequences of ``lengths`` out in stretches of ``sizes``; those behind are of padding alone."""
    device, flat = input_ids.device, input_ids.flatten()
    size = torch.tensor(sizes, device=device)
    starts = size.cumsum(0) - size
    place = mask.flatten().nonzero().squeeze(1)
    length = torch.tensor(lengths, device=device)
    of = torch.repeat_interleave(torch.arange(len(lengths), device=device), length)
    slot = torch.arange(len(place), device=device) + (starts[: len(lengths)] - (length.cumsum(0) - length))[of]
    places = torch.full((sum(sizes),), -1, device=device)
    places[slot] = place
    following = torch.full_like(places, -1)
    following[slot[:-1]] = torch.where(of[1:] == of[:-1], place[1:], -1)
    sequence = torch.repeat_interleave(torch.arange(len(sizes), device=device), size)
    position = torch.arange(sum(sizes), device=device) - starts[sequence]
    chunk = position * 2 * cp // size[sequence]
    dealt = torch.minimum(chunk, 2 * cp - 1 - chunk).argsort(stable=True).view(cp, rows, -1)
    own = dealt[cp_rank]
    labels = torch.where(following >= 0, flat[following], 0)
    return PackedSequences(
        input_ids=torch.where(places >= 0, flat[places], 0)[own],
        position_ids=position[own],
        labels=labels[own],
        loss_mask=(following >= 0)[own],
        places=places[dealt],
        following=following[dealt],
        shape=(input_ids.size(0), input_ids.size(1)),
        packed_seq_params=_params(sizes, device) if rows == 1 and len(sizes) > len(lengths) else None,
    )


def _params(sizes: list[int], device: torch.device) -> PackedSeqParams:
    """Padding counts as part of the sequence in front of it: attention is causal, so that nothing sees it."""
    from megatron.core.packed_seq_params import PackedSeqParams

    present = [size for size in sizes if size]
    starts = torch.tensor([0, *present], device=device).cumsum(0).int()
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        cu_seqlens_q_padded=starts,
        cu_seqlens_kv_padded=starts,
        max_seqlen_q=max(present),
        max_seqlen_kv=max(present),
    )


def unpack_sequences(packed: PackedSequences, values: Tensor, *, following: bool = False) -> Tensor:
    """Put what all context-parallel ranks computed for their tokens back in the places of the batch.

    Args:
        packed: what the model was given.
        values: ``[cp, rows, tokens]``, by context-parallel rank.
        following: a value belongs to the token that follows, as a log-probability does; else to the token itself.

    Returns:
        ``[batch, seq]``, zero where no token has a value.
    """
    places = packed.following if following else packed.places
    if values.shape != places.shape:
        raise BatchError(f"values must be [cp, rows, tokens] = {tuple(places.shape)}, found {tuple(values.shape)}")
    batch, seq = packed.shape
    found = places >= 0
    return values.new_zeros(batch * seq).index_put((places[found],), values[found]).view(batch, seq)
