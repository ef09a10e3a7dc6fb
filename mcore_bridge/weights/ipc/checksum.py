"""A number for the bits of a tensor, computed where the tensor is: quick on a GPU, and the same on every device.

It tells apart what differs by mistake. It is no protection against somebody who looks for two tensors with one number.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

_ROW = 1 << 16  # words of 8 bytes that are mixed with one pattern; on a CPU they stay in its cache
_ROWS = {"cpu": 1}  # rows that are in memory several times over; elsewhere more, for fewer kernels
_FIRST, _SECOND = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9  # odd, below 2 ** 63


def checksums(tensors: Iterable[Tensor]) -> list[int]:
    """One number for each tensor, of its elements in the order of its dims; every bit and every place counts."""
    sums = [_checksum(tensor.detach()) for tensor in tensors]  # all at work before the first is asked for
    return [int(total.item()) for total in sums]


def _checksum(tensor: Tensor) -> Tensor:
    octets = tensor.contiguous().view(-1).view(torch.uint8)
    whole = octets.numel() // 8 * 8
    words = octets[:whole] if octets.storage_offset() % 8 == 0 else octets[:whole].clone()
    words, pattern = words.view(torch.int64), _pattern(tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    num_rows = _ROWS.get(tensor.device.type, 64)
    in_rows = len(words) // _ROW * _ROW
    for start in range(0, in_rows, num_rows * _ROW):
        rows = words[start : min(start + num_rows * _ROW, in_rows)].view(-1, _ROW)
        total += _mixed(rows ^ pattern, start // _ROW)
    rest = words[in_rows:]
    total += _mixed((rest ^ pattern[: len(rest)]).view(1, -1), in_rows // _ROW)
    return total + _mixed((octets[whole:].to(torch.int64) ^ pattern[-8 : octets.numel() - whole - 8]).view(1, -1), -1)


@cache
def _pattern(device: torch.device) -> Tensor:
    """Another number for each place in a row."""
    places = torch.arange(1, _ROW + 1, device=device) * _FIRST
    return (places ^ (places >> 31)) * _SECOND


def _mixed(rows: Tensor, first: int) -> Tensor:
    """The sum of all words, each of them mixed, with another weight for each row. ``rows`` is overwritten."""
    rows.mul_(_SECOND)
    sums = rows.bitwise_xor_(rows >> 32).sum(1)
    weights = torch.arange(first, first + len(sums), device=rows.device) * 2 + 3
    return (sums * weights).sum()
