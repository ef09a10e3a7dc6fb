"""What is known of a tensor before it is there."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One HF tensor: name, shape, dtype, and its digest when it was asked for."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sha256: str | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that the tensor takes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize
