"""Cuts a batch into microbatches for megatron-core's schedule. Pipeline stages need microbatches of equal length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mcore_bridge.batches.packing import PackedSequences, pack_sequences, rounded_up
from mcore_bridge.config.mesh.alike import Content, Shared, digest_of, problem_of_ranks, replica_groups
from mcore_bridge.config.mesh.parallel_dims import ParallelDims
from mcore_bridge.errors import BatchError
from mcore_bridge.weights.model_chunks import Models, chunks_of, groups_of, unwrap
from mcore_bridge.weights.transfer.collectives import Group

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig

_OF_EXPERTS = ("loss", "training", "adapters")
"""Values that must also be equal on replicas that share experts: experts compute the tokens of all these replicas."""
_OF_STAGE = ("requires_grad",)
"""Values that must be equal on the ranks of a stage. Other stages have other parameters."""
_DISTRIBUTE = "distribute batches by parallel_state.get_data_parallel_rank(), not by the rank in the job"
_ADVICE = {
    "input_ids": _DISTRIBUTE,
    "images": _DISTRIBUTE,
    "training": "call train() or eval() on every rank",
    "dtype": "make the models of every rank in the same way",
    "requires_grad": "freeze the same parameters on each rank",
}
"""What to do if a value differs between ranks, unless it is an argument of which each rank passes one value."""


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
    """Microbatches of ``size`` rows, with at least ``min_tokens`` in a row.

    With virtual stages there are microbatches of padding at the end, so that their number is a multiple of ``pp``.
    """
    groups = chunk.pg_collection
    stages = groups.pp.size()
    count = rounded_up(len(input_ids), size * stages if num_chunks > 1 else size)
    rows = list(zip(*(_padded(whole, count).split(size) for whole in (input_ids, attention_mask)), strict=True))
    dims = ParallelDims(tp=groups.tp.size(), cp=groups.cp.size(), sp=chunk.config.sequence_parallel)
    unit = multiple_of or tokens_in_fp8(chunk.config)
    options = {"cp_rank": groups.cp.rank(), "packed": packed, "multiple_of": unit, "min_tokens": min_tokens}
    return [pack_sequences(ids, mask, dims=dims, **options) for ids, mask in rows]


Checked = Callable[[], tuple[Callable[..., list[PackedSequences]], Shared]]
"""Checks the arguments of a call. Returns a function that makes microbatches with at least ``min_tokens`` in a row, and
the values that must be equal on all ranks of a replica.
"""


def agreed_micro_batches(models: Models, checked: Checked, *, learns: bool) -> list[PackedSequences]:
    """The microbatches of a batch, in sizes on which the ranks agree. All ranks of a replica have the batch.

    With pipeline stages, all microbatches get the same length. If the token dispatcher requires equal lengths, this
    also holds among all ranks that share experts.

    Args:
        models: this rank's chunks.
        checked: checks the arguments, and ``models``.
        learns: whether a backward follows.

    Raises:
        BatchError: a batch cannot be used, or ranks of a replica have different arguments. All ranks of the replica
            raise. With experts, all ranks that share them raise, since they would wait for each other. The rank whose
            ``checked`` raised raises that error.
    """
    batches: list[PackedSequences] = []
    problem: Exception | None = None
    shared: Shared = {}
    groups, has_experts = groups_of(models), True  # a rank without chunks cannot know, and others may wait for it
    try:
        chunk = chunks_of(models)[0]
        has_experts = bool(chunk.config.num_moe_experts)
        pack, shared = checked()
        batches = pack(min_tokens=0)
        if learns:
            _require_tokens(chunk, batches)
    except Exception as error:  # any error, even out of memory: other ranks may wait for this rank's experts
        problem = error
    of_replica = {name: value for name, value in shared.items() if name not in _OF_STAGE}
    problem = problem_of_ranks(replica_groups(groups), problem, of_replica, BatchError, _ADVICE)
    if learns and problem is None:  # a backward communicates for each parameter that is trained
        given = {name: shared[name] for name in _OF_STAGE}
        problem = problem_of_ranks([groups.tp, groups.cp], None, given, BatchError, _ADVICE)
        problem = problem_of_ranks([groups.pp], problem, {}, BatchError)
    if has_experts and {*Group(groups.tp_ep).members} - {*Group(groups.tp).members}:  # tp has compared already
        given = {name: shared.get(name) for name in _OF_EXPERTS}
        problem = problem_of_ranks([groups.tp_ep], problem, given, BatchError, _ADVICE)
    if problem is not None:
        raise problem
    longest = _longest(chunk, batches)
    may_differ = groups.pp.size() == 1 and not _assumes_equal_lengths(chunk)
    if may_differ or all(batch.num_tokens == longest for batch in batches):
        return batches
    return pack(min_tokens=longest)


def _longest(chunk: GPTModel, batches: Sequence[PackedSequences]) -> int:
    """Tokens in a row of the longest microbatch: on this rank, or on all that share experts and need equal lengths.

    Raises:
        BatchError: on all ranks that share experts, if a rank would wait for another forever.
    """
    own, count = max((batch.num_tokens for batch in batches), default=0), len(batches)
    if not chunk.config.num_moe_experts:
        return own
    here = (own, batches[0].input_ids.size(0)) if batches and _assumes_equal_lengths(chunk) else (own, 0)
    sharing = Group(chunk.pg_collection.tp_ep)
    longest, rows, least, most, fewest = sharing.most([*here, -here[1], count, -count])
    if most != -fewest:
        raise BatchError(
            f"replicas that share experts must have the same number of microbatches, found {-fewest} to {most}; give "
            "all of them batches with the same number of rows"
        )
    if rows != -least:
        raise BatchError(
            "replicas that share experts by moe_token_dispatcher_type='allgather' must have the same number of rows in "
            f"a microbatch, found {-least} to {rows}; set micro_batch_size, or pass packed=True"
        )
    return int(longest) if _assumes_equal_lengths(chunk) else own


def shared_by_stages(chunks: Sequence[nn.Module], *, learns: bool) -> Shared:
    """Properties of parameters that must be equal on ranks, because communication depends on them.

    Args:
        chunks: the chunks of this rank, wrapped or not.
        learns: whether a backward follows.
    """
    bare = [unwrap(chunk) for chunk in chunks]
    sizes: Counter[torch.dtype] = Counter()
    for parameter in chain.from_iterable(chunk.decoder.parameters() for chunk in bare):
        sizes[parameter.dtype] += parameter.numel()
    dtype = max(sizes, key=sizes.__getitem__, default=bare[0].config.params_dtype)  # a stage may have no layers
    if not learns:
        return {"dtype": dtype}
    flags = [parameter.requires_grad for chunk in bare for parameter in chunk.parameters()]
    trained = Content(f"{sum(flags)} of {len(flags)} parameters", digest_of(bytes(flags)))
    return {"dtype": dtype, "requires_grad": trained}


def balances_experts(config: TransformerConfig) -> bool:
    """Whether the training of routers depends on the number of tokens of each expert."""
    has_bias = config.moe_router_enable_expert_bias and config.moe_router_bias_update_rate
    return bool(config.num_moe_experts and (_has_auxiliary_loss(config) or config.moe_z_loss_coeff or has_bias))


def _has_auxiliary_loss(config: TransformerConfig) -> bool:
    coefficients = config.moe_aux_loss_coeff
    return any(coefficients) if isinstance(coefficients, list) else bool(coefficients)


def _require_tokens(chunk: GPTModel, batches: Sequence[PackedSequences]) -> None:
    """Raise ``BatchError`` if the auxiliary loss of routers would be divided by zero tokens."""
    if _has_auxiliary_loss(chunk.config) and not all(bool((batch.places >= 0).any()) for batch in batches):
        raise BatchError(
            "with moe_aux_loss_coeff each microbatch must have a token, found a microbatch of only padding. Leave "
            "out rows of padding; with virtual pipeline stages, take a multiple of "
            f"{chunk.pg_collection.pp.size()} microbatches"
        )


def _assumes_equal_lengths(chunk: GPTModel) -> bool:
    """Whether the token dispatcher needs equal numbers of tokens on all ranks that share experts."""
    return bool(chunk.config.num_moe_experts) and chunk.config.moe_token_dispatcher_type == "allgather"


def tokens_in_fp8(config: TransformerConfig) -> int:
    """TransformerEngine 2.11 needs a multiple of this number of tokens on a rank, with sequence parallelism too."""
    return {"blockwise": 128, "mxfp8": 32}.get(str(config.fp8_recipe), 16) if config.fp8 else 1


def _padded(rows: Tensor, count: int) -> Tensor:
    """``rows`` padded with rows of zeros to ``[count, seq]``."""
    return torch.cat((rows, rows.new_zeros(count - len(rows), rows.size(1))))
