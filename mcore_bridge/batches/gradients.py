"""Completes gradients of models without megatron-core's DDP, so that they equal the gradients with DDP.

After a backward without DDP, a gradient is only a part of the whole one. For norms under sequence parallelism, norms of
queries and keys, tied embeddings and experts, the parts of other ranks are missing. For all parameters, the parts of
other context-parallel ranks and replicas are missing. megatron-core's ``finalize_model_grads`` adds these parts for
chunks in its DDP; this module adds them to ``parameter.grad``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from mcore_bridge.batches.text_collectives import reduce_sum
from mcore_bridge.weights.model_chunks import chunks_of


@contextlib.contextmanager
def finishing_gradients(models: Sequence[nn.Module], drafts: Sequence[nn.Module] = ()) -> Iterator[None]:
    """In the block, megatron-core's schedule completes the gradients of these chunks, unless other code does.

    If the trainer has set ``config.finalize_model_grads_func``, this function gets the drafts, too. If DDP or FSDP
    holds gradients and there is no such function, nothing is done. Earlier gradients are already complete. So they are
    set aside in the block, and added at its end.

    Args:
        models: the chunks that the schedule runs.
        drafts: chunks that run beside them.
    """
    chunks = chunks_of([*models, *drafts])
    config: Any = chunks[0].config
    learning = [parameter for chunk in chunks for parameter in chunk.parameters() if parameter.requires_grad]
    if (theirs := config.finalize_model_grads_func) is not None:
        config.finalize_model_grads_func = partial(_with_drafts, theirs, drafts)
        try:
            yield
        finally:
            config.finalize_model_grads_func = theirs
        return
    if any(map(is_held, learning)):
        yield
        return
    before = [parameter.grad for parameter in learning]
    for parameter in learning:
        parameter.grad = None
    config.finalize_model_grads_func = partial(_with_drafts, _finish, drafts)
    try:
        yield
    finally:
        config.finalize_model_grads_func = None
        for parameter, grad in zip(learning, before, strict=True):
            if grad is not None:
                parameter.grad = grad if parameter.grad is None else grad.add_(parameter.grad)


def is_held(parameter: nn.Parameter) -> bool:
    """Whether gradients are elsewhere: DDP has ``main_grad``, and FSDP makes a DTensor of a parameter."""
    return hasattr(parameter, "main_grad") or hasattr(parameter, "full_tensor")


def _with_drafts(
    finish: Callable[..., Any], drafts: Sequence[nn.Module], models: Sequence[nn.Module], *rest: Any, **options: Any
) -> None:
    finish([*models, *drafts], *rest, **options)


def _finish(models: Sequence[nn.Module], num_tokens: Any = None, **options: Any) -> None:
    """The function that a schedule calls after its last backward."""
    from megatron.core.distributed import finalize_model_grads

    with torch.no_grad():
        finalize_model_grads([_LikeDDP(model) for model in models], num_tokens, **options)


class _LikeDDP(nn.Module):
    """A chunk with the attributes of DDP that ``finalize_model_grads`` uses."""

    def __init__(self, model: nn.Module) -> None:
        from megatron.core.distributed import DistributedDataParallelConfig

        super().__init__()
        self.module, self.ddp_config = model, DistributedDataParallelConfig()

    def finish_grad_sync(self, **options: Any) -> None:
        """Average over all ranks that have other tokens, as DDP does. Parameters without a gradient get zeros."""
        (chunk,) = chunks_of(self.module)
        groups = chunk.pg_collection
        for parameter in chunk.parameters():
            if parameter.requires_grad:
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                group = groups.dp_cp if getattr(parameter, "allreduce", True) else groups.expt_dp
                parameter.grad = reduce_sum(grad.div_(groups.dp_cp.size()), group)
