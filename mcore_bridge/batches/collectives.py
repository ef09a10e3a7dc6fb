"""What batches communicate: reductions over vocabulary shards, tokens of context-parallel ranks, results of a stage."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_bridge.config.mesh.lost_ranks import naming_lost_ranks


@naming_lost_ranks("reducing log-probabilities or sizes")
def reduce_max(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The largest of all ranks, in place."""
    if group.size() > 1:
        dist.all_reduce(value, dist.ReduceOp.MAX, group=group)
    return value


@naming_lost_ranks("reducing log-probabilities")
def reduce_sum(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over all ranks, in place."""
    if group.size() > 1:
        dist.all_reduce(value, group=group)
    return value


@naming_lost_ranks("gathering what context-parallel ranks computed")
def gather(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``[ranks, *own.shape]``. What comes after must be the same on every rank: each keeps the gradient of its own."""
    if group.size() == 1:
        return own[None]
    found: Tensor = _Gather.apply(own, group)
    return found


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.rank = group.rank()
        whole = own.new_empty(group.size(), *own.shape)
        dist.all_gather([*whole.unbind()], own.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[ctx.rank], None


@naming_lost_ranks("receiving outputs of the last pipeline stage")
def from_last(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """What the last rank of ``group`` has, on all of them, in place."""
    if group.size() > 1:
        dist.broadcast(value, dist.get_global_rank(group, group.size() - 1), group=group)
    return value
