"""Digests of the tensors of a batch, which ranks compare in place of the tensors."""

from __future__ import annotations

import torch
from torch import Tensor

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
