"""Completes gradients of models without megatron-core's DDP, so that they equal the gradients with DDP.

After a backward without DDP, a gradient is only a part of the whole one. For norms under sequence parallelism, norms of
queries and keys, tied embeddings and experts, the parts of other ranks are missing. For all parameters, the parts of
other context-parallel ranks and replicas are missing. megatron-core's ``finalize_model_grads`` adds these parts for
chunks in its DDP; this module adds them to ``parameter.grad``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from mcore_bridge.batches.text_collectives import reduce_sums
from mcore_bridge.weights.model_chunks import chunks_of, unwrap

Holders = Sequence[Sequence[Any]]
"""For each chunk the instances of megatron-core's DDP that have gradients of its parameters."""


@contextlib.contextmanager
def finishing_gradients(
    models: Sequence[nn.Module], drafts: Sequence[nn.Module] = (), holders: Holders = ()
) -> Iterator[None]:
    """In the block, megatron-core's schedule completes the gradients of these chunks, unless other code does.

    If the trainer has set ``config.finalize_model_grads_func``, this function gets the drafts, too. If DDP or FSDP
    holds gradients and there is no such function, nothing is done. Earlier gradients are already complete. So they are
    set aside in the block, and added at its end.

    Args:
        models: the chunks that the schedule runs, wrapped or not.
        drafts: chunks that run beside them.
        holders: the schedule completes the gradients in these, too, by the trainer's function if there is one. They
            communicate in the last microbatch.
    """
    chunks = chunks_of([*models, *drafts])
    config: Any = chunks[0].config
    given = config.finalize_model_grads_func
    of_chunks = [[parameter for parameter in chunk.parameters() if parameter.requires_grad] for chunk in chunks]
    learning = [*{id(parameter): parameter for parameter in chain.from_iterable(of_chunks)}.values()]
    if given is None and not any(holders) and any(map(is_held, learning)):
        yield
        return
    changed: dict[str, Any] = {"finalize_model_grads_func": partial(_finish, given, drafts, holders, of_chunks)}
    if any(holders):
        changed |= {"no_sync_func": partial(_without_sync, holders), "grad_sync_func": None, "param_sync_func": None}
    before = {name: getattr(config, name) for name in changed}
    is_ours = given is None or any(holders)
    earlier = [(parameter, parameter.grad) for parameter in learning if is_ours and parameter.grad is not None]
    for parameter, _ in earlier:
        parameter.grad = None
    for name, value in changed.items():
        setattr(config, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)
        again = [(grad, parameter.grad) for parameter, grad in earlier if parameter.grad is not None]
        if again:
            torch._foreach_add_(*map(list, zip(*again, strict=True)))
        for parameter, grad in earlier:
            parameter.grad = grad


def is_held(parameter: nn.Parameter) -> bool:
    """Whether gradients are elsewhere: DDP has ``main_grad``, and FSDP makes a DTensor of a parameter."""
    return hasattr(parameter, "main_grad") or hasattr(parameter, "full_tensor")


def holder_of(model: nn.Module) -> Any:
    """megatron-core's DDP among the wrappers of a chunk, or None."""
    around: Any = model
    while around is not unwrap(model):
        if hasattr(around, "param_to_bucket_group"):
            return around
        around = around.module
    return None


@contextlib.contextmanager
def _without_sync(holders: Holders) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for ddp in (ddp for of_chunk in holders for ddp in of_chunk):
            stack.enter_context(ddp.no_sync())
        yield


def _finish(
    given: Any,
    drafts: Sequence[nn.Module],
    holders: Holders,
    learning: Sequence[Sequence[nn.Parameter]],
    models: Sequence[nn.Module],
    num_tokens: Any = None,
    **options: Any,
) -> None:
    """The function that a schedule calls after its last backward."""
    from megatron.core.distributed import finalize_model_grads

    with torch.no_grad():
        if given is not None and not any(holders):
            given([*models, *drafts], num_tokens, **options)
            return
        of_chunks = [*(holders or [()] * len(models)), *(filter(None, [holder_of(draft)]) for draft in drafts)]
        likes = [*map(_LikeDDP, [*models, *drafts], of_chunks, learning)]
        (given or finalize_model_grads)(likes, num_tokens, **options)


class _LikeDDP(nn.Module):
    """A chunk with the attributes of DDP that ``finalize_model_grads`` uses.

    Args:
        model: the chunk, wrapped or not.
        holders: the instances of DDP that have some of the gradients. Other gradients are in ``parameter.grad``.
        learning: the parameters that have gradients.
    """

    def __init__(self, model: nn.Module, holders: Iterable[Any], learning: Sequence[nn.Parameter]) -> None:
        from megatron.core.distributed import DistributedDataParallelConfig

        super().__init__()
        self.module, self._holders = model, tuple(holders)
        self.ddp_config = self._holders[0].ddp_config if self._holders else DistributedDataParallelConfig()
        (self._chunk,) = chunks_of(model)
        own = [parameter for parameter in learning if not is_held(parameter)]
        self._dense = [parameter for parameter in own if getattr(parameter, "allreduce", True)]
        self._of_experts = [parameter for parameter in own if not getattr(parameter, "allreduce", True)]

    def finish_grad_sync(self, **options: Any) -> None:
        """Average over all ranks that have other tokens, as DDP does. Parameters without a gradient get zeros."""
        for ddp in self._holders:
            ddp.finish_grad_sync(**options)
        groups = self._chunk.pg_collection
        for group, parameters in ((groups.dp_cp, self._dense), (groups.expt_dp, self._of_experts)):
            grads = [torch.zeros_like(own) if own.grad is None else own.grad for own in parameters]
            if grads:
                torch._foreach_div_(grads, groups.dp_cp.size())
                reduce_sums(grads, group)
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = grad

    def scale_gradients(self, factor: Any) -> None:
        """Multiply all gradients."""
        for ddp in self._holders:
            ddp.scale_gradients(factor)
        if grads := [own.grad for own in (*self._dense, *self._of_experts) if own.grad is not None]:
            torch._foreach_mul_(grads, factor)
