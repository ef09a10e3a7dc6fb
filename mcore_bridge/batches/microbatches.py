"""The microbatches that a batch goes through megatron-core's schedule in, and what they must agree in."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mcore_bridge.batches.collectives import reduce_max
from mcore_bridge.batches.packing import PackedSequences, pack_sequences, rounded_up
from mcore_bridge.config.parallel import ParallelDims
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
) -> list[PackedSequences]:
    """Of ``size`` rows each. With pipeline stages all are alike, and with virtual ones fill the last round.

    Those of all ranks that share experts are alike where these do not ask each other how many tokens they have.
    """
    groups = chunk.pg_collection
    stages = groups.pp.size()
    count = rounded_up(len(input_ids), size * stages if num_chunks > 1 else size)
    rows = list(zip(*(_filled(each, count).split(size) for each in (input_ids, attention_mask)), strict=True))
    dims = ParallelDims(tp=groups.tp.size(), cp=groups.cp.size(), sp=chunk.config.sequence_parallel)
    unit = multiple_of or tokens_in_fp8(chunk.config)
    pack = partial(pack_sequences, dims=dims, cp_rank=groups.cp.rank(), packed=packed, multiple_of=unit)
    found = [pack(*each) for each in rows]
    longest = _longest(chunk, found)
    if (stages == 1 and not _is_blind(chunk)) or all(each.num_tokens == longest for each in found):
        return found
    return [pack(*each, min_tokens=longest) for each in rows]


def _longest(chunk: GPTModel, found: Sequence[PackedSequences]) -> int:
    """Tokens of a row of the longest microbatch: of all that share experts, where these must be alike.

    Raises:
        BatchError: on all of these, where one would wait for another for ever.
    """
    own, count = max(each.num_tokens for each in found), len(found)
    if not chunk.config.num_moe_experts:
        return own
    ids = found[0].input_ids
    here = (own, ids.size(0)) if _is_blind(chunk) else (own, 0)
    sizes = torch.tensor([*here, -here[1], count, -count], device=ids.device)
    longest, rows, least, most, fewest = reduce_max(sizes, chunk.pg_collection.tp_ep).tolist()
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


def _is_blind(chunk: GPTModel) -> bool:
    """Whether ranks that share experts take for granted that all of them have as many tokens."""
    return bool(chunk.config.num_moe_experts) and chunk.config.moe_token_dispatcher_type == "allgather"


def tokens_in_fp8(config: TransformerConfig) -> int:
    """What TransformerEngine 2.11 wants the tokens of a rank to be a multiple of, under sequence parallelism too."""
    return {"blockwise": 128, "mxfp8": 32}.get(str(config.fp8_recipe), 16) if config.fp8 else 1


def _filled(rows: Tensor, count: int) -> Tensor:
    """``[count, seq]``, with rows of zeros behind those that are there."""
    return torch.cat((rows, rows.new_zeros(count - len(rows), rows.size(1))))
