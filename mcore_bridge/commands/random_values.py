"""Random weights that differ from each other. They depend only on the name of a tensor and a seed.

Untrained weights hide mistakes: norms are one, biases are zero, and copied experts are equal. If two equal tensors are
exchanged, no comparison of values shows it.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_SMALL = 1e-3
"""Smaller numbers hardly change what a model computes, even in wrong places."""
_FLAT = 0.05
"""A tensor is flat if its values differ by less than this part of the largest one."""
_PART = 0.4
"""The largest part by which a value is changed. Signs stay, as scales must be positive."""
_WIDTH = 0.3
"""The largest value in the place of zeros in a vector."""


def is_flat(tensor: Tensor) -> bool:
    """Whether the values of a tensor are all equal, or nearly so, or nearly zero."""
    low, high = _ends(tensor)
    return _is_small(tensor) or high - low < _FLAT * max(abs(low), abs(high))


def varied(name: str, tensor: Tensor, *, seed: int = 0) -> Tensor:
    """A tensor with each value changed a little, in fp32. Zeros, and values that are all nearly zero, become others.

    Args:
        name: the name of the tensor; other names give other values.
        tensor: a tensor of any shape.
        seed: other seeds get other values.
    """
    own, offsets = tensor.float(), _offsets(name, tensor.shape, seed)
    is_zero = torch.full_like(own, _is_small(tensor), dtype=torch.bool) | (own == 0)
    return torch.where(is_zero, own + _width(own.shape) * offsets, own * (1 + _PART * offsets))


def drawn(name: str, tensor: Tensor, *, seed: int = 0) -> Tensor:
    """Random values that replace the initial values of a module, in its dtype: none zero or one, all different if
    possible.

    Matrices are around zero. Flat tensors keep their mean, and other vectors their range. So norms are around one, and
    decay rates of a state-space model decay.
    """
    low, high = _ends(tensor)
    center, width = (low + high) / 2, (high - low) / 2
    if is_flat(tensor):
        width = _PART * abs(center)
    if _is_small(tensor) or (tensor.dim() > 1 and not is_flat(tensor)):
        center, width = 0.0, _width(tensor.shape)
    return _rounded(center + width * _offsets(name, tensor.shape, seed), center, tensor.dtype)


def _offsets(name: str, shape: torch.Size, seed: int) -> Tensor:
    """Values in ``[-1, 1]`` that are all different and none near zero, in a random order. fp32, of ``shape``."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    count, (scale, shift) = shape.numel(), torch.rand(2, generator=generator, dtype=torch.float64)
    places = torch.randperm(count, generator=generator).double() - (count - 1) / 2
    sizes = (0.9 + 0.1 * scale) * (0.1 + 0.9 * (places.abs() + shift) / (count / 2 + 0.5))
    return torch.where(places < 0, -sizes, sizes).float().view(shape)


def _rounded(values: Tensor, center: float, dtype: torch.dtype) -> Tensor:
    """Values in ``dtype``. Of those that have 16 bits, the numbers in the range of the values are dealt out evenly."""
    if dtype.itemsize != 2 or values.numel() < 2:
        return values.to(dtype)
    codes = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float().sort().values
    nearest, farthest = (float(end) for end in (values - center).abs().aminmax())
    distances = (codes - center).abs()
    fitting = codes[(distances >= nearest) & (distances <= farthest) & (codes != 0) & (codes != 1)]
    order = values.flatten().argsort().argsort()
    return fitting[order * len(fitting) // values.numel()].view(values.shape).to(dtype)


def _ends(tensor: Tensor) -> tuple[float, float]:
    if not tensor.numel():
        return 0.0, 0.0
    low, high = tensor.float().aminmax()
    return float(low), float(high)


def _is_small(tensor: Tensor) -> bool:
    return max(map(abs, _ends(tensor))) < _SMALL


def _width(shape: torch.Size) -> float:
    """The largest value around zero with which a product with the tensor keeps the size of its input."""
    return _WIDTH if len(shape) < 2 else float((3 / max(shape[-2:])) ** 0.5)
