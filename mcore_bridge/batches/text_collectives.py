"""The collectives of ``batches``: over vocabulary shards, context-parallel ranks and pipeline stages.

Ranks compare the tensors of a batch by digests, which are short texts made from the bits of a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_bridge.config.mesh.lost_ranks import naming_lost_ranks
from mcore_bridge.errors import BatchError
from mcore_bridge.rules.spec import runs_within

_TOGETHER = 64 << 20
"""Bytes of gradients that are summed at once, for which a copy is made."""


def require_group(group: object) -> None:
    """Raise ``BatchError`` unless ``group`` is a process group."""
    if not isinstance(group, dist.ProcessGroup):
        raise BatchError(
            f"group must be the tensor-parallel process group, found {type(group).__name__}: pass "
            "parallel_state.get_tensor_model_parallel_group()"
        )


@naming_lost_ranks("reducing log-probabilities or sizes")
def reduce_max(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The elementwise maximum over all ranks, in place."""
    if group.size() > 1:
        dist.all_reduce(value, dist.ReduceOp.MAX, group=group)
    return value


@naming_lost_ranks("reducing log-probabilities")
def reduce_sum(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over all ranks, in place."""
    if group.size() > 1:
        dist.all_reduce(value, group=group)
    return value


@naming_lost_ranks("summing gradients")
def reduce_sums(values: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """The sum of each tensor over all ranks, in place. Small tensors travel together."""
    if group.size() == 1:
        return
    for dtype in dict.fromkeys(value.dtype for value in values):
        of_dtype = [value for value in values if value.dtype == dtype]
        for run in runs_within(of_dtype, lambda value: value.nbytes, _TOGETHER):
            flat = torch.cat([value.flatten() for value in run]) if len(run) > 1 else run[0]
            dist.all_reduce(flat, group=group)
            if len(run) > 1:
                parts = flat.split([value.numel() for value in run])
                torch._foreach_copy_(run, [part.view_as(value) for part, value in zip(parts, run, strict=True)])


@naming_lost_ranks("gathering outputs of context-parallel ranks")
def gather(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The tensors of all ranks, as ``[ranks, *own.shape]``.

    Each rank keeps only the gradient of its own tensor, so all ranks must compute equal values from the result.
    """
    if group.size() == 1:
        return own[None]
    whole: Tensor = _Gather.apply(own, group)
    return whole


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
def broadcast_from_last(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Copy the tensor of the last rank of ``group`` to all its ranks, in place."""
    if group.size() > 1:
        dist.broadcast(value, dist.get_global_rank(group, group.size() - 1), group=group)
    return value


_MIXING, _POSITIVE = 0x9E3779B97F4A7C1, 2**62 - 1
_AT_ONCE = 1 << 22
"""Numbers of eight bytes that are mixed at once: 32 MB, and two temporary tensors of this size."""


def digest_of_tokens(input_ids: Tensor, mask: Tensor) -> str:
    """A digest of the tokens of a batch and their positions. The values at padding do not count."""
    return digest((input_ids + 1).where(mask, 0))


def digest(values: Tensor) -> str:
    """A digest of a tensor's dtype, shape and bits, equal on every device."""
    flat = values.detach().contiguous().flatten().view(torch.uint8)
    flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).view(torch.int64)
    total = 0
    for start in range(0, flat.numel(), _AT_ONCE):
        part = flat[start : start + _AT_ONCE]
        odd = 2 * torch.arange(start, start + part.numel(), device=part.device) + 1
        total += int((part * (odd * _MIXING)).sum())
    return f"{str(values.dtype).removeprefix('torch.')} {[*values.shape]} {total & _POSITIVE:x}"
