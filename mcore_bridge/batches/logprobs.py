"""Log-probabilities and entropies from logits whose vocabulary is cut over tensor-parallel ranks, not gathered."""

from __future__ import annotations

import math
from collections.abc import Iterator
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mcore_bridge.batches.collectives import reduce_max, reduce_sum
from mcore_bridge.errors import BatchError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

LEAST_TEMPERATURE = 1e-6
"""Logits that are divided by less may be infinite."""
CHUNK = 1 << 24
"""Elements that are made fp32 at once: 64 MB, of which three or four are there."""


def log_probs(
    logits: Tensor, labels: Tensor, *, vocab_size: int, group: ProcessGroup, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of ``labels``, and entropies of what they were drawn from; both can be differentiated.

    Two small all-reduces. Beside the logits it takes 0.25 GB at most, and their gradient on the way back.

    Args:
        logits: ``[..., padded vocab / tp]`` of this tensor-parallel rank.
        labels: int64 ``[...]``, tokens of the whole vocabulary, the same on every rank.
        vocab_size: without padding, whose logits do not count.
        group: the tensor-parallel group.
        temperature: what logits are divided by; above 0.

    Returns:
        Two of fp32 ``[...]``.

    Raises:
        BatchError: shapes do not fit, or the temperature is none.
    """
    require_temperature(temperature)
    if logits.shape[:-1] != labels.shape:
        raise BatchError(f"logits {tuple(logits.shape)} must have a vocabulary behind labels {tuple(labels.shape)}")
    if not 0 < vocab_size <= logits.size(-1) * group.size():
        raise BatchError(f"{group.size()} ranks with {logits.size(-1)} logits each are no vocabulary of {vocab_size}")
    flat = logits.reshape(-1, logits.size(-1))
    found = _LogProbs.apply(flat, labels.flatten(), vocab_size, group, temperature)
    return found[0].view(labels.shape), found[1].view(labels.shape)


def require_temperature(temperature: float) -> None:
    """Refuse what logits cannot be divided by: log-probabilities would be NaN, and gradients too."""
    if not (isinstance(temperature, Real) and LEAST_TEMPERATURE <= temperature < math.inf):
        raise BatchError(
            f"temperature must be a number of at least {LEAST_TEMPERATURE}, found {temperature!r}: a greedy choice has "
            "no log-probs of its own, so pass the temperature that the model is trained with, such as 1.0"
        )


class _LogProbs(torch.autograd.Function):
    """Of ``[tokens, vocab / tp]``. The softmax is computed again on the way back, as it would take twice the logits."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, vocab_size: int, group: ProcessGroup, temperature: float
    ) -> tuple[Tensor, Tensor]:
        first = group.rank() * logits.size(-1)
        ctx.num_valid, ctx.temperature = max(min(logits.size(-1), vocab_size - first), 0), temperature
        peak = torch.full(labels.shape, -torch.inf, device=logits.device)
        for at, part in _chunks(ctx, logits):
            peak[at] = part.amax(-1)
        peak = reduce_max(peak, group)
        own = (labels >= first) & (labels < first + ctx.num_valid)
        column = torch.where(own, labels - first, 0)
        sums = torch.zeros(3, len(labels), device=logits.device)
        for at, part in _chunks(ctx, logits):
            shifted = part.sub_(peak[at, None])
            sums[2, at] = shifted.gather(1, column[at, None])[:, 0] * own[at]
            weights = shifted.exp()
            sums[0, at], sums[1, at] = weights.sum(-1), weights.mul_(shifted).sum(-1)
        total, weighted, chosen = reduce_sum(sums, group)
        log_total = total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(logits, column, own, peak + log_total, entropy)
        return chosen - log_total, entropy

    @staticmethod
    def backward(ctx: Any, of_log_probs: Tensor, of_entropy: Tensor) -> tuple[Tensor | None, ...]:
        logits, column, own, log_total, entropy = ctx.saved_tensors
        grad = torch.zeros_like(logits)
        for at, part in _chunks(ctx, logits):
            logs = part.sub_(log_total[at, None])
            each = logs.exp()
            each.mul_(logs.add_(entropy[at, None]).mul_(of_entropy[at, None]).add_(of_log_probs[at, None])).neg_()
            each.scatter_add_(1, column[at, None], (of_log_probs[at] * own[at])[:, None])
            grad[at, : ctx.num_valid] = each.div_(ctx.temperature)
        return grad, None, None, None, None


def _chunks(ctx: Any, logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """The logits that count, as new fp32 divided by the temperature, some tokens at a time. A rank may have none."""
    step = max(CHUNK // logits.size(-1), 1)
    for start in range(0, len(logits) if ctx.num_valid else 0, step):
        at = slice(start, min(start + step, len(logits)))
        yield at, logits[at, : ctx.num_valid].to(torch.float32, copy=True).div_(ctx.temperature)
