"""The description of a tensor that need not exist yet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class Shaped(Protocol):
    """A tensor, or an object with its shape and dtype."""

    @property
    def shape(self) -> Sequence[int]:
        """Sizes of all dims."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of an element."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The name of a tensor, in HF or in megatron-core, with its shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(name: str, tensor: Shaped) -> TensorSpec:
        """The spec of a tensor under this name."""
        return TensorSpec(name, tuple(tensor.shape), tensor.dtype)

    @property
    def numel(self) -> int:
        """The number of elements of the tensor."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """The size of the tensor in bytes."""
        return self.numel * self.dtype.itemsize
