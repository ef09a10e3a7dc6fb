"""Log-probabilities and entropies from vocab-parallel logits. The logits are never gathered."""

from __future__ import annotations

import math
from collections.abc import Iterator
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mcore_bridge.arguments import Kind, ids_on, is_count, require
from mcore_bridge.batches.text_collectives import digest, reduce_max, reduce_sum, require_group
from mcore_bridge.config.mesh.alike import Shared, agreed
from mcore_bridge.errors import BatchError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

LEAST_TEMPERATURE = 1e-6
"""Logits divided by less than this may be infinite."""
IGNORED = -100
"""The label that does not count, as in torch and transformers."""
_LOGITS = Kind(
    "a tensor of floats [..., padded vocab / tp]",
    lambda value: isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0,
    "pass the output of the last stage",
)
CHUNK = 1 << 24
"""Elements that are converted to fp32 at a time: 64 MB, of which three or four copies exist at once."""


def log_probs(
    logits: Tensor, labels: Tensor, *, vocab_size: int, group: ProcessGroup, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of ``labels``, and entropies of the distributions that predict them. Both have gradients.

    All ranks of ``group`` call it together. It does three small all-reduces, the first of which compares labels and
    arguments of the ranks. Beside the logits it takes at most 0.25 GB, and in the backward their gradient.

    Args:
        logits: ``[..., padded vocab / tp]`` of this tensor-parallel rank.
        labels: int64 ``[...]``, tokens of the whole vocabulary, equal on every rank. A label of -100, torch's
            ``ignore_index``, does not count: both results are 0.0 there, and no gradient comes from it.
        vocab_size: the size without padding. Logits of the padding do not count.
        group: the tensor-parallel group.
        temperature: logits are divided by it. It is above 0.

    Returns:
        Log-probabilities and entropies, both fp32 ``[...]``.

    Raises:
        BatchError: on every rank of the group. Shapes do not fit, a label is not in the vocabulary, the temperature is
            not a positive number, or ranks have different labels or arguments.

    Example:
        >>> logits, labels = torch.zeros(2, 4, 96), torch.ones(2, 4, dtype=torch.int64)
        >>> labels[0, 1] = -100
        >>> group = parallel_state.get_tensor_model_parallel_group()
        >>> values, entropies = mb.log_probs(logits, labels, vocab_size=96, group=group)
        >>> values.shape, round(-values[0, 0].item(), 4), values[0, 1].item()              # log(96), and an ignored one
        (torch.Size([2, 4]), 4.5643, 0.0)
    """
    require_group(group)

    def checked() -> tuple[float, Shared]:
        divisor = require_temperature(temperature)
        _require_labels(logits, labels, vocab_size, group)
        own = {"labels": digest(labels), "vocab_size": vocab_size, "temperature": divisor, "width": logits.size(-1)}
        return divisor, own

    divisor = agreed([group], checked, BatchError)
    return vocab_parallel(logits, labels, vocab_size=vocab_size, group=group, temperature=divisor)


def vocab_parallel(
    logits: Tensor, labels: Tensor, *, vocab_size: int, group: ProcessGroup, temperature: float
) -> tuple[Tensor, Tensor]:
    """``log_probs`` of arguments that are checked and compared."""
    flat = logits.reshape(-1, logits.size(-1))
    both = _LogProbs.apply(flat, labels.flatten(), vocab_size, group, temperature)
    chosen, entropy = (values.view(labels.shape).masked_fill(labels == IGNORED, 0.0) for values in both)
    return chosen, entropy


def require_temperature(temperature: object) -> float:
    """Refuse a temperature for which log-probabilities and gradients would be NaN. Returns it as a ``float``."""
    is_real = isinstance(temperature, Real) and not isinstance(temperature, bool)
    if is_real and LEAST_TEMPERATURE <= temperature < math.inf:  # type: ignore[operator]  # a Real is ordered
        return float(temperature)  # type: ignore[arg-type]
    raise BatchError(
        f"temperature must be a number of at least {LEAST_TEMPERATURE}, found {temperature!r}. Pass the temperature "
        "of training, such as 1.0: greedy sampling has no log-probs"
    )


def _require_labels(logits: Tensor, labels: Tensor, vocab_size: object, group: ProcessGroup) -> None:
    require(BatchError, logits=(logits, _LOGITS), labels=(labels, ids_on(getattr(logits, "device", None))))
    if logits.shape[:-1] != labels.shape:
        raise BatchError(
            f"logits must have the shape of labels, {tuple(labels.shape)}, followed by the vocabulary, found "
            f"{tuple(logits.shape)}"
        )
    most = logits.size(-1) * group.size()
    if not (is_count(vocab_size) and vocab_size <= most):
        raise BatchError(
            f"vocab_size must be 1 to {most}, as {group.size()} ranks have {logits.size(-1)} logits each, found "
            f"{vocab_size!r}"
        )
    counted = labels.where(labels != IGNORED, 0)
    low, high = counted.aminmax() if counted.numel() else (counted.sum(), counted.sum())
    if int(low) < 0 or int(high) >= vocab_size:
        raise BatchError(
            f"labels must be 0 to {vocab_size - 1}, or {IGNORED} for ignored tokens, found {low} to {high}: replace "
            f"other labels by {IGNORED}"
        )


class _LogProbs(torch.autograd.Function):
    """``log_probs`` for logits ``[tokens, vocab / tp]``.

    The backward computes the softmax again: in fp32, a stored softmax would take twice the memory of the logits.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, vocab_size: int, group: ProcessGroup, temperature: float
    ) -> tuple[Tensor, Tensor]:
        first = group.rank() * logits.size(-1)
        ctx.num_valid, ctx.temperature = num_valid(logits, vocab_size, group), temperature
        peak = torch.full(labels.shape, -torch.inf, dtype=torch.float32, device=logits.device)
        for at, part in in_fp32(logits, ctx.num_valid, temperature):
            peak[at] = part.amax(-1)
        peak = reduce_max(peak, group)
        own = (labels >= first) & (labels < first + ctx.num_valid)
        column = torch.where(own, labels - first, 0)
        sums = torch.zeros(3, len(labels), dtype=torch.float32, device=logits.device)
        for at, part in in_fp32(logits, ctx.num_valid, temperature):
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
        for at, part in in_fp32(logits, ctx.num_valid, ctx.temperature):
            logs = part.sub_(log_total[at, None])
            chunk = logs.exp()
            chunk.mul_(logs.add_(entropy[at, None]).mul_(of_entropy[at, None]).add_(of_log_probs[at, None])).neg_()
            chunk.scatter_add_(1, column[at, None], (of_log_probs[at] * own[at])[:, None])
            grad[at, : ctx.num_valid] = chunk.div_(ctx.temperature)
        return grad, None, None, None, None


def num_valid(logits: Tensor, vocab_size: int, group: ProcessGroup) -> int:
    """The number of columns of this tensor-parallel rank that are no padding."""
    return max(min(logits.size(-1), vocab_size - group.rank() * logits.size(-1)), 0)


def in_fp32(logits: Tensor, num_valid: int, temperature: float = 1.0) -> Iterator[tuple[slice, Tensor]]:
    """The logits without padding, as new fp32 divided by the temperature, some tokens at a time.

    A rank that holds only padding has none.
    """
    step = max(CHUNK // logits.size(-1), 1)
    for start in range(0, len(logits) if num_valid else 0, step):
        at = slice(start, min(start + step, len(logits)))
        yield at, logits[at, :num_valid].to(torch.float32, copy=True).div_(temperature)
