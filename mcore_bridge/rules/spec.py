"""Descriptions of tensors by name, shape and dtype, without memory.

It also has the alignment of tensors in a window or buffer, and groups consecutive items up to a number of bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

Pair = tuple[str, Tensor]
"""An HF name and its tensor."""


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
    """The name of a tensor, in HF or in megatron-core, with its shape and dtype.

    Attributes:
        name: its name.
        shape: its whole shape.
        dtype: its dtype.
    """

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


@dataclass(frozen=True, slots=True)
class TowerSpec(TensorSpec):
    """A tensor of a tower.

    Attributes:
        is_linear: whether it is the weight ``[out, in]`` of a linear layer that a forward runs.
    """

    is_linear: bool = False


ALIGNMENT = 256
"""Bytes: a multiple of every itemsize, so that tensors can be viewed in place, and of the widest read of a GPU."""


def aligned(num_bytes: int) -> int:
    """Round ``num_bytes`` up to the next offset at which a tensor may begin."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


Item = TypeVar("Item")


def runs_within(items: Iterable[Item], size: Callable[[Item], int], limit: int) -> Iterator[list[Item]]:
    """Yield runs of consecutive items with at most ``limit`` bytes together, unless a single item has more.

    >>> list(runs_within([3, 2, 4, 9], int, 5))
    [[3, 2], [4], [9]]
    """
    run: list[Item] = []
    filled = 0
    for item in items:
        own = size(item)
        if run and filled + own > limit:
            yield run
            run, filled = [], 0
        run.append(item)
        filled += own
    if run:
        yield run
