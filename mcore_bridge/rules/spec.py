"""The description of a tensor that need not exist yet."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, shape and dtype of one HF tensor; and its digest, if that was asked for."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sha256: str | None = None

    @property
    def num_bytes(self) -> int:
        """The size of the tensor in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize
