"""Checks of ``forward``: refuse batches, models and losses with which it would fail or give wrong results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mcore_bridge.batches.drafting import problem_of
from mcore_bridge.batches.gradients import is_held
from mcore_bridge.batches.microbatches import balances_experts
from mcore_bridge.batches.packing import require_mask
from mcore_bridge.errors import BatchError
from mcore_bridge.weights.model_chunks import chunks_of

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

ROWS_ONLY = ("all_gather", "a2a+p2p")
"""Values of ``cp_comm_type`` for which TransformerEngine does not support packed sequences."""


def require_batch(input_ids: Tensor, attention_mask: Tensor | None) -> None:
    """Refuse shapes that do not fit, and masks with other values than 1 and 0."""
    if input_ids.dim() != 2 or not input_ids.numel():
        raise BatchError(
            f"input_ids must be [batch, seq] with at least one token, found {tuple(input_ids.shape)}: "
            "pass a row for each sequence"
        )
    if attention_mask is not None:
        if attention_mask.shape != input_ids.shape:
            raise BatchError(
                f"attention_mask must have the shape of input_ids, {tuple(input_ids.shape)}, found "
                f"{tuple(attention_mask.shape)}"
            )
        require_mask(attention_mask)


def require_vocabulary(input_ids: Tensor, is_text: Tensor, vocab_size: int) -> None:
    """Refuse tokens of text outside the vocabulary. Ids of image tokens may be outside.

    The padded embedding has rows for some of these tokens, so they would silently give wrong log-probs.
    """
    low, high = input_ids.where(is_text, 0).aminmax()
    if int(low) < 0 or int(high) >= vocab_size:
        raise BatchError(
            f"input_ids must be 0 to {vocab_size - 1} where attention_mask is 1, found {low} to {high}: use the "
            "tokenizer of this model, and mask out other tokens"
        )


def require_runnable(chunk: GPTModel, *, packed: bool, learns: bool) -> None:
    """Refuse models for which the schedule would fail or give wrong results.

    All pipeline stages must decide alike. So no check may depend on modules that only some stages have.
    """
    config = chunk.config
    if getattr(config, "draft", None) is not None:
        raise BatchError("models must be of a policy, found a draft head: pass the policy, and the head as drafts=")
    if packed and config.context_parallel_size > 1 and config.cp_comm_type in ROWS_ONLY:
        raise BatchError(f"with cp_comm_type={config.cp_comm_type!r} sequences cannot be packed: pass packed=False")
    rope = getattr(config, "hf_rope", None)
    again = learns and config.multi_latent_attention and config.recompute_granularity == "full"
    if again and not packed and rope is not None and rope.is_dynamic and config.pipeline_model_parallel_size > 1:
        raise BatchError(
            f"a rope of type {rope.rope_type!r} depends on the lengths of rows, which latent attention no longer has "
            "when a pipeline stage recomputes it: pass packed=True, or build with recompute_granularity='selective'"
        )
    if config.mtp_num_layers:
        raise BatchError(
            f"mtp_num_layers must be 0 or None for forward, found {config.mtp_num_layers}: megatron-core adds an MTP "
            "loss, for which forward has no labels. Build without MTP layers, or call the model yourself with labels"
        )
    if learns and balances_experts(config) and config.moe_router_enable_expert_bias and not hasattr(chunk, "bridge"):
        raise BatchError(
            "megatron-core's own routers with an expert bias would count padding as tokens. Build the model with "
            "build_model, or without moe_router_bias_update_rate and router losses"
        )
    cut = config.tensor_model_parallel_size
    if config.num_moe_experts and cut > 1 and not config.sequence_parallel and chunk.training:
        raise BatchError(
            f"megatron-core needs sp=True to train experts with tp={cut}, found sp=False: build the model with "
            "sp=True, or without tensor parallelism; or call eval() of each chunk, for log-probs alone"
        )
    if not chunk.parallel_output and cut > 1:
        raise BatchError(
            "parallel_output must be True for forward, which reads each tensor-parallel rank's own logits, found "
            "False: build the model with parallel_output=True"
        )
    if learns and config.calculate_per_token_loss:
        raise BatchError(
            "calculate_per_token_loss must be False for forward, which does not count tokens, found True: build the "
            "model without it"
        )


def require_drafts(chunk: GPTModel, drafts: Sequence[nn.Module], steps: int, *, learns: bool, has_images: bool) -> None:
    """Refuse draft heads that cannot run beside the model of a chunk, or whose gradients would stay incomplete."""
    if not drafts and steps > 1:
        raise BatchError(f"draft_steps must be 1 without drafts, found {steps}: pass drafts, or leave draft_steps out")
    if not drafts:
        return
    problems = [problem] if (problem := problem_of(chunk, drafts, steps)) else []
    if has_images:
        problems.append("images must be None, because nobody has written drafts of images")
    learning = [parameter for part in (chunk, *chunks_of(drafts)) for parameter in part.parameters()]
    held = {is_held(parameter) for parameter in learning if parameter.requires_grad}
    if learns and len(held) > 1:
        problems.append("the draft head and the model must both be wrapped in DDP, or neither")
    if problems:
        raise BatchError(f"with drafts, {'; '.join(problems)}: correct it, or leave out drafts")


def require_own_mesh(chunk: GPTModel) -> None:
    """Refuse a model of another mesh than ``parallel_state`` has, which megatron-core's schedule uses.

    Exports, loads and checkpoints use the groups of the model.
    """
    from megatron.core import parallel_state as state

    now = {
        "tp": state.get_tensor_model_parallel_group(),
        "pp": state.get_pipeline_model_parallel_group(),
        "cp": state.get_context_parallel_group(),
    }
    ranks_of = torch.distributed.get_process_group_ranks
    ranks = {axis: (ranks_of(group), ranks_of(getattr(chunk.pg_collection, axis))) for axis, group in now.items()}
    if differ := {axis: both for axis, both in ranks.items() if both[0] != both[1]}:
        raise BatchError(
            "parallel_state must have the mesh on which the model was built, found other ranks in its groups, as "
            f"(parallel_state, model): {differ}. Initialise it with the mesh of the model"
        )


def require_scalar(loss: object, outputs: Tensor) -> Tensor:
    """Check that ``loss`` is a scalar through which gradients flow to ``outputs``, if these need gradients."""
    wanted = "loss must return a scalar tensor that is computed from the outputs it is given"
    if not isinstance(loss, Tensor):
        raise BatchError(f"{wanted}, found {type(loss).__name__}: return the sum or mean, and nothing else")
    if loss.numel() != 1 or not loss.is_floating_point():
        raise BatchError(f"{wanted}, found {loss.dtype} of shape {tuple(loss.shape)}: return its sum or mean")
    if outputs.requires_grad and not _depends(loss, outputs):
        raise BatchError(
            f"{wanted}, found a loss that sends no gradient to them. Do not use detach, item or no_grad in it. For "
            "rows without a loss, return outputs.log_probs.sum() * 0"
        )
    return loss


def _depends(loss: Tensor, outputs: Tensor) -> bool:
    """Whether ``loss`` depends on ``outputs`` in the autograd graph."""
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is outputs.grad_fn:
            return True
        if node is not None and node not in seen:
            seen.add(node)
            waiting.extend(following for following, _ in node.next_functions)
    return False
