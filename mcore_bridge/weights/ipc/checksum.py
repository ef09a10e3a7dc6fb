"""A number for the bits of a tensor, computed where the tensor is: quick on a GPU, and the same on every device.

It tells apart what differs by mistake. It is no protection against somebody who looks for two tensors with one number.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_CHUNK = 1 << 22  # words of 8 bytes that are in memory several times over
_FIRST, _SECOND = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9  # odd, below 2 ** 63


def checksums(tensors: Iterable[Tensor]) -> list[int]:
    """One number for each tensor, of its elements in the order of its dims; every bit and every place counts."""
    sums = [_checksum(tensor.detach()) for tensor in tensors]  # all at work before the first is asked for
    return [int(total.item()) for total in sums]


def _checksum(tensor: Tensor) -> Tensor:
    octets = tensor.contiguous().view(-1).view(torch.uint8)
    whole = octets.numel() // 8 * 8
    words = octets[:whole] if octets.storage_offset() % 8 == 0 else octets[:whole].clone()
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, whole // 8, _CHUNK):
        total += _mixed(words.view(torch.int64)[start : start + _CHUNK], start)
    return total + _mixed(octets[whole:].to(torch.int64), whole)


def _mixed(words: Tensor, start: int) -> Tensor:
    """The sum of all words, each of them mixed with its place."""
    places = torch.arange(start + 1, start + 1 + words.numel(), device=words.device)
    mixed = words + places * _FIRST
    mixed = (mixed ^ (mixed >> 29)) * _SECOND
    return (mixed ^ (mixed >> 32)).sum()
