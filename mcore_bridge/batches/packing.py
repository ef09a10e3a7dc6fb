"""Pack the sequences of a padded batch, and cut them for context parallelism.

Every sequence is cut into ``2 * cp`` chunks. Rank r has the chunks r and 2cp-1-r, as in megatron-core and
TransformerEngine. Labels are computed before the cut, so they are also right at the borders of chunks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mcore_bridge.arguments import COUNT, FLAG, LEAST_0, ids_on, instance_of, require, tensor_on
from mcore_bridge.batches.lengths import with_lengths
from mcore_bridge.config.mesh.parallel_dims import ParallelDims
from mcore_bridge.errors import BatchError

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams


SHORT = 512
"""The least number of tokens in a sequence of padding."""


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """The inputs of a model on one context-parallel rank, and the positions of their tokens in the batch.

    Attributes:
        input_ids: int64 ``[rows, tokens]``; one row if sequences are packed.
        position_ids: int64 ``[rows, tokens]``: the position of a token in its own sequence. Padding has the position of
            the last token.
        labels: int64 ``[rows, tokens]``: the next token of the sequence; 0 at its end.
        loss_mask: bool ``[rows, tokens]``: whether there is a next token.
        places: int64 ``[cp, rows, tokens]``: indices into the flattened batch of the tokens of all context-parallel
            ranks; -1 for padding.
        following: int64 ``[cp, rows, tokens]``: such indices of the next tokens; -1 if there is no next token.
        shape: ``(batch, seq)`` of the batch.
        packed_seq_params: for ``GPTModel``, if sequences are packed; else None.

    Example:
        >>> packed = mb.pack_sequences(input_ids, attention_mask)
        >>> packed.position_ids, packed.labels
        (tensor([[0, 1, 2, 3, 0, 1, 2]]), tensor([[2, 3, 4, 0, 6, 7, 0]]))
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
        """Tokens in a row, summed over all context-parallel ranks, padding included."""
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
    """Pack the sequences of a batch, without its padding, and take the tokens of one context-parallel rank.

    Each sequence is padded to a multiple that context parallelism needs. Sequences of padding are added at the end for
    sequence parallelism.

    Args:
        input_ids: int64 ``[batch, seq]``, on any device.
        attention_mask: ``[batch, seq]``, 1 or True for tokens and 0 for padding, which may be anywhere. None: there is
            no padding.
        dims: the mesh; only ``tp``, ``cp`` and ``sp`` matter. None: a single rank.
        cp_rank: the context-parallel rank whose tokens to take.
        packed: True: all sequences share one row. False: each sequence has a separate row, padded on the right to the
            longest, for models that cannot take packed sequences.
        multiple_of: the tokens of a rank are padded to a multiple of this: 16 for FP8, 128 for its blockwise recipe.
        min_tokens: the least length of a row, summed over context-parallel ranks. With it microbatches can get equal
            lengths.

    Returns:
        The tokens of this rank, ``[rows, tokens]``, with positions, labels, and their places in the batch.

    Raises:
        BatchError: shapes do not fit, there is no token, or the mesh has no rank ``cp_rank``.

    Example:
        >>> packed = mb.pack_sequences(input_ids, attention_mask)
        >>> packed.input_ids                              # sequences of four and three tokens, without the padding
        tensor([[1, 2, 3, 4, 5, 6, 7]])
    """
    require(
        BatchError,
        input_ids=(input_ids, ids_on()),
        attention_mask=(attention_mask, tensor_on(getattr(input_ids, "device", None)).or_none()),
        dims=(dims, instance_of("a ParallelDims", ParallelDims, advice="write ParallelDims(...)").or_none()),
        cp_rank=(cp_rank, LEAST_0),
        packed=(packed, FLAG),
        multiple_of=(multiple_of, COUNT),
        min_tokens=(min_tokens, LEAST_0),
    )
    dims = ParallelDims() if dims is None else dims
    if input_ids.dim() != 2 or (attention_mask is not None and attention_mask.shape != input_ids.shape):
        shapes = [tuple(input_ids.shape), attention_mask if attention_mask is None else tuple(attention_mask.shape)]
        raise BatchError(f"input_ids and attention_mask must both be [batch, seq], found {shapes}: reshape them")
    if attention_mask is not None:
        require_mask(attention_mask)
    if not input_ids.numel():
        raise BatchError(
            f"input_ids must be [batch, seq] with at least one token, found {tuple(input_ids.shape)}: "
            "pass a row for each sequence"
        )
    if not 0 <= cp_rank < dims.cp:
        raise BatchError(
            f"cp_rank must be 0 to {dims.cp - 1} at cp={dims.cp}, found {cp_rank}: pass the rank in the cp group"
        )
    unit = 2 * dims.cp if dims.cp > 1 else 1
    row = math.lcm(unit, dims.cp * (dims.tp if dims.sp else 1) * multiple_of)
    mask = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask != 0
    lengths = mask.sum(1).tolist()
    if packed:
        sizes = [rounded_up(length, unit) for length in lengths]
        whole = max(rounded_up(sum(sizes), row), rounded_up(min_tokens, row), row)
        sizes += _padding_sizes(whole - sum(sizes), max(sizes, default=0))
    else:
        sizes = [max(rounded_up(max(lengths, default=0), row), rounded_up(min_tokens, row), row)] * len(lengths)
    rows = 1 if packed else len(lengths)
    return lay_out(input_ids, mask, lengths, sizes, rows, dims.cp, cp_rank)


def require_mask(attention_mask: Tensor) -> None:
    """Refuse masks with other values than 1 and 0. A mask that is added to scores (0, -1e9) would be read inverted."""
    if attention_mask.dtype == torch.bool or bool(((attention_mask == 0) | (attention_mask == 1)).all()):
        return
    low, high = attention_mask.aminmax()
    raise BatchError(
        f"attention_mask must be 1 or True for tokens and 0 for padding, found {attention_mask.dtype} from "
        f"{low.item()} to {high.item()}. If the mask is added to scores, pass mask == 0. If it numbers the sequences "
        "of a row, give each sequence a separate row"
    )


def _padding_sizes(num_tokens: int, longest: int) -> list[int]:
    """Lengths of sequences of padding with ``num_tokens`` together; at least one sequence.

    They are not longer than the longest real sequence, since attention takes memory and time for the longest. But they
    may always have ``SHORT`` tokens, so that there are few of them.
    """
    size = max(longest, SHORT)
    whole, rest = divmod(num_tokens, size)
    return [*[size] * whole, rest]


def rounded_up(number: int, unit: int) -> int:
    """The smallest multiple of ``unit`` that is at least ``number``."""
    return -(-number // unit) * unit


def lay_out(
    input_ids: Tensor, mask: Tensor, lengths: list[int], sizes: list[int], rows: int, cp: int, cp_rank: int
) -> PackedSequences:
    """Place sequences of ``lengths`` into ranges of ``sizes``. Further ranges at the end are padding."""
    device, flat = input_ids.device, input_ids.flatten()
    size = torch.tensor(sizes, device=device)
    starts = size.cumsum(0) - size
    place = mask.flatten().nonzero().squeeze(1)
    length = torch.tensor(lengths, device=device)
    of = torch.repeat_interleave(torch.arange(len(lengths), device=device), length)
    position = torch.arange(len(place), device=device) + (starts[: len(lengths)] - (length.cumsum(0) - length))[of]
    places = torch.full((sum(sizes),), -1, device=device)
    places[position] = place
    following = torch.full_like(places, -1)
    following[position[:-1]] = torch.where(of[1:] == of[:-1], place[1:], -1)
    sequence = torch.repeat_interleave(torch.arange(len(sizes), device=device), size)
    position = torch.arange(sum(sizes), device=device) - starts[sequence]
    chunk = position * 2 * cp // size[sequence]
    dealt = torch.minimum(chunk, 2 * cp - 1 - chunk).argsort(stable=True).view(cp, rows, -1)
    own = dealt[cp_rank]
    labels = torch.where(following >= 0, flat[following], 0)
    filled = [*lengths, *[0] * (len(sizes) - len(lengths))]
    last = (torch.tensor(filled, device=device) - 1).clamp(min=0)
    return PackedSequences(
        input_ids=torch.where(places >= 0, flat[places], 0)[own],
        position_ids=torch.minimum(position, last[sequence])[own],
        labels=labels[own],
        loss_mask=(following >= 0)[own],
        places=places[dealt],
        following=following[dealt],
        shape=(input_ids.size(0), input_ids.size(1)),
        packed_seq_params=_params(sizes, filled, device) if rows == 1 and len(sizes) > len(lengths) else None,
    )


def _params(sizes: list[int], lengths: list[int], device: torch.device) -> PackedSeqParams:
    """The parameters of packed attention. Padding belongs to the sequence before it: causal attention ignores it."""
    from megatron.core.packed_seq_params import PackedSeqParams

    present = [size for size in sizes if size]
    starts = torch.tensor([0, *present], device=device).cumsum(0).int()
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        cu_seqlens_q_padded=starts,
        cu_seqlens_kv_padded=starts,
        max_seqlen_q=max(present),
        max_seqlen_kv=max(present),
    )
    return with_lengths(params, [length for length, size in zip(lengths, sizes, strict=True) if size])


def unpack_sequences(packed: PackedSequences, values: Tensor, *, following: bool = False) -> Tensor:
    """Put values of packed tokens back to the positions of the batch: the inverse of ``pack_sequences``.

    Args:
        packed: the inputs of the model, from ``pack_sequences``.
        values: ``[cp, rows, tokens]``: one value per token, from all context-parallel ranks. Or ``n`` values per token,
            as ``[cp, rows, tokens, n]``.
        following: True: a value belongs to the next token, like a log-probability. False: it belongs to the token
            itself.

    Returns:
        ``[batch, seq]`` or ``[batch, seq, n]``, zero where there is no value.

    Raises:
        BatchError: ``values`` have another shape.

    Example:
        >>> packed = mb.pack_sequences(input_ids, attention_mask)
        >>> mb.unpack_sequences(packed, packed.input_ids[None])       # [cp, rows, tokens] --> [batch, seq]
        tensor([[1, 2, 3, 4],
                [5, 6, 7, 0]])
    """
    require(
        BatchError,
        packed=(packed, instance_of("a result of pack_sequences", PackedSequences, advice="pass one that it returned")),
        values=(values, tensor_on()),
        following=(following, FLAG),
    )
    places = packed.following if following else packed.places
    if values.shape[:3] != places.shape:
        raise BatchError(
            f"values must be [cp, rows, tokens] = {tuple(places.shape)}, found {tuple(values.shape)}: "
            "pass values of all ranks of cp"
        )
    batch, seq = packed.shape
    has_value = places >= 0
    tail = values.shape[3:]
    whole = values.new_zeros(batch * seq, *tail).index_put((places[has_value],), values[has_value])
    return whole.view(batch, seq, *tail)
