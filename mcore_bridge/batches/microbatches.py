"""The microbatches that a batch goes through megatron-core's schedule in, and what they must agree in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mcore_bridge.batches.collectives import reduce_max
from mcore_bridge.batches.packing import PackedSequences, pack_sequences, rounded_up
from mcore_bridge.config.mesh.parallel_dims import ParallelDims
from mcore_bridge.errors import BatchError

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig


def micro_batches(
    chunk: GPTModel,
    input_ids: Tensor,
    attention_mask: Tensor,
    size: int,
    num_chunks: int,
    *,
    packed: bool,
    multiple_of: int | None,
    min_tokens: int,
) -> list[PackedSequences]:
    """Of ``size`` rows each, with as many tokens in a row at least; with virtual stages, they fill the last round."""
    groups = chunk.pg_collection
    stages = groups.pp.size()
    count = rounded_up(len(input_ids), size * stages if num_chunks > 1 else size)
    rows = list(zip(*(_filled(each, count).split(size) for each in (input_ids, attention_mask)), strict=True))
    dims = ParallelDims(tp=groups.tp.size(), cp=groups.cp.size(), sp=chunk.config.sequence_parallel)
    unit = multiple_of or tokens_in_fp8(chunk.config)
    options = {"cp_rank": groups.cp.rank(), "packed": packed, "multiple_of": unit, "min_tokens": min_tokens}
    return [pack_sequences(*each, dims=dims, **options) for each in rows]


def alike(
    chunk: GPTModel, checked: Callable[[], Callable[..., list[PackedSequences]]], device: torch.device, *, learns: bool
) -> list[PackedSequences]:
    """The microbatches of a batch.

    With pipeline stages all are alike; and so are those of all ranks that share experts, where these do not ask each
    other how many tokens they have.

    Args:
        checked: gives what makes them of ``min_tokens`` in a row at least, or raises.
        device: of the batch.
        learns: whether a backward follows.

    Raises:
        BatchError: where a batch cannot be taken; with experts, on all ranks that share them, which would wait for each
            other. What ``checked`` raises, on the rank where it does.
    """
    found: list[PackedSequences] = []
    problem = None
    try:
        pack = checked()
        found = pack(min_tokens=0)
        if learns:
            _require_tokens(chunk, found)
    except Exception as error:  # such as no memory: others may wait for this rank's experts
        problem = error
    longest = _longest(chunk, found, problem, device)
    one_by_one = chunk.pg_collection.pp.size() == 1 and not _is_blind(chunk)
    return found if one_by_one or all(each.num_tokens == longest for each in found) else pack(min_tokens=longest)


def _longest(chunk: GPTModel, found: Sequence[PackedSequences], problem: Exception | None, device: torch.device) -> int:
    """Tokens of a row of the longest microbatch: of all that share experts, where these must be alike.

    Raises:
        BatchError: on all of these, where one would wait for another for ever.
    """
    own, count = max((each.num_tokens for each in found), default=0), len(found)
    if not chunk.config.num_moe_experts:
        if problem is not None:
            raise problem
        return own
    here = (own, found[0].input_ids.size(0)) if found and _is_blind(chunk) else (own, 0)
    sizes = torch.tensor([problem is not None, *here, -here[1], count, -count], device=device)
    is_bad, longest, rows, least, most, fewest = reduce_max(sizes, chunk.pg_collection.tp_ep).tolist()
    if is_bad:
        raise problem or BatchError("a rank that shares experts with this one cannot take its batch, and says why")
    if most != -fewest:
        raise BatchError(
            f"replicas that share experts must take equally many microbatches, found {-fewest} to {most}; give all of "
            "them batches of as many rows"
        )
    if rows != -least:
        raise BatchError(
            "replicas that share experts by moe_token_dispatcher_type='allgather' must have equally many rows in a "
            f"microbatch, found {-least} to {rows}; set micro_batch_size, or let rows be packed"
        )
    return int(longest) if _is_blind(chunk) else own


def balances(config: TransformerConfig) -> bool:
    """Whether routers learn from how many tokens each expert gets."""
    has_bias = config.moe_router_enable_expert_bias and config.moe_router_bias_update_rate
    return bool(config.num_moe_experts and (_has_auxiliary_loss(config) or config.moe_z_loss_coeff or has_bias))


def _has_auxiliary_loss(config: TransformerConfig) -> bool:
    coefficients = config.moe_aux_loss_coeff
    return any(coefficients) if isinstance(coefficients, list) else bool(coefficients)


def _require_tokens(chunk: GPTModel, found: Sequence[PackedSequences]) -> None:
    """Raise ``BatchError`` where the auxiliary loss of routers would be divided by no token."""
    if _has_auxiliary_loss(chunk.config) and not all(bool((each.places >= 0).any()) for each in found):
        raise BatchError(
            "with moe_aux_loss_coeff each microbatch must have a token that counts, but one has none: leave out rows "
            "of padding alone, and with virtual pipeline stages take a multiple of "
            f"{chunk.pg_collection.pp.size()} microbatches"
        )


def _is_blind(chunk: GPTModel) -> bool:
    """Whether ranks that share experts take for granted that all of them have as many tokens."""
    return bool(chunk.config.num_moe_experts) and chunk.config.moe_token_dispatcher_type == "allgather"


def tokens_in_fp8(config: TransformerConfig) -> int:
    """What TransformerEngine 2.11 wants the tokens of a rank to be a multiple of, under sequence parallelism too."""
    return {"blockwise": 128, "mxfp8": 32}.get(str(config.fp8_recipe), 16) if config.fp8 else 1


def _filled(rows: Tensor, count: int) -> Tensor:
    """``[count, seq]``, with rows of zeros behind those that are there."""
    return torch.cat((rows, rows.new_zeros(count - len(rows), rows.size(1))))
