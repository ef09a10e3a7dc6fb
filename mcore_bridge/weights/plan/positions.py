"""Where the elements of a shard are in HF tensors: flat positions there, for flat positions in the shard.

They follow from a trace, by arithmetic. If several shards have an element, it is only a part of the first of them, as
in an export. Padding is a part of no HF tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from mcore_bridge.rules.mapping import Binding, unstacked
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.rules.trace import Copy, Shape, Trace

_AT_ONCE = 1 << 24
"""Elements whose positions are computed at once, to limit the memory for their coordinates."""


class Positions(NamedTuple):
    """Elements of a shard in one HF tensor.

    Attributes:
        number: the number of the HF tensor in ``ShardPositions.hf``.
        chosen: which of the given elements they are.
        hf: their flat positions in the HF tensor, int64.
    """

    number: int
    chosen: Tensor
    hf: Tensor


@dataclass(frozen=True, slots=True)
class ShardPositions:
    """The HF tensors that have elements of one shard, and where.

    Attributes:
        hf: these tensors, whole. A tensor of all experts has its whole shape. Second names come last.
        trace: of the parameter.
        shard: the number of the shard.
        parts: the part of the trace that each of ``hf`` is, and the flat position at which the part begins there.
    """

    hf: tuple[TensorSpec, ...]
    trace: Trace
    shard: int
    parts: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, binding: Binding, trace: Trace, shard: int, dtype: torch.dtype, num_experts: int) -> ShardPositions:
        """The positions of a shard of the parameter of ``binding``, which has this trace and dtype."""
        hf, parts = [], []
        for part, name in [*enumerate(binding.hf), *((0, name) for name in binding.copies)]:
            shape = trace.part_shapes[part]
            whole, number = unstacked(name)
            hf.append(TensorSpec(whole, shape if number is None else (num_experts, *shape), dtype))
            parts.append((part, (number or 0) * math.prod(shape)))
        return cls(tuple(hf), trace, shard, tuple(parts))

    def of_elements(self, flat: Tensor) -> Iterator[Positions]:
        """Yield, for each HF tensor in order, the given elements that are in it, in one or more steps.

        Args:
            flat: flat positions in the shard, int64.
        """
        copies = [copy for copy in _copies(self.trace) if copy.shard == self.shard]
        for number, (part, start) in enumerate(self.parts):
            for first in range(0, len(flat), _AT_ONCE):
                for copy in copies:
                    if copy.part == part:
                        chosen, hf = self._of_copy(copy, flat[first : first + _AT_ONCE])
                        yield Positions(number, chosen + first, hf + start)

    def _of_copy(self, copy: Copy, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Which of the elements are in a copy, and where they are in its part."""
        shape, steps = self.trace.shard_shape, _strides(self.trace.shard_shape)
        along = flat // steps[copy.dim] % shape[copy.dim] - copy.shard_start
        (chosen,) = ((along >= 0) & (along < copy.size)).nonzero(as_tuple=True)
        flat = flat[chosen]
        hf = torch.zeros_like(flat)
        for dim, stride in enumerate(_strides_in_shard(copy, self.trace.part_shapes[copy.part])):
            if dim == copy.dim:
                hf += (copy.part_start + along[chosen] * copy.part_step) * stride
            else:
                hf += flat // steps[dim] % shape[dim] * stride
        return chosen, hf


def _copies(trace: Trace) -> Sequence[Copy]:
    """The copies by which elements are counted: each element of a part is in one of them."""
    return trace.to_hf


def _strides(shape: Shape) -> Sequence[int]:
    """The distance of neighbours along each dim of a contiguous tensor."""
    return [*accumulate(reversed(shape[1:]), int.__mul__, initial=1)][::-1]


def _strides_in_shard(copy: Copy, part_shape: Shape) -> Sequence[int]:
    """The strides of a part, in the order of the dims of the shard."""
    strides = _strides(part_shape)
    if copy.view is None:
        return strides
    names = copy.view.left.split()
    return [strides[names.index(name)] for name in copy.view.right.split()]
