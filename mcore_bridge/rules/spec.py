"""The description of a tensor that need not exist yet."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The name of a tensor, in HF or in megatron-core, with its shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """The number of elements of the tensor."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """The size of the tensor in bytes."""
        return self.numel * self.dtype.itemsize
