"""Weights with their adapters merged: new tensors that an export makes of this rank's shards, one after the other.

No shard needs another for it. Sums are in fp64 and rounded once, so that bits do not depend on how a weight is cut.
(A sum that lies within some 2^-50 of a boundary of rounding could differ, if kernels add in another order.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from mcore_bridge.rules.names import canonical
from mcore_bridge.weights.model_chunks import numbering_of
from mcore_bridge.weights.transfer.endpoints import Merge, check_storage

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

_BLOCK = 1 << 22
"""Numbers in fp64 that a merge holds at once, some 32 MB a tensor."""
_LOW = (1 << 29) - 1
"""The bits of a fraction in fp64 that one in fp32 has not."""


class Factors(Protocol):
    """What a merge reads of an adapter: ``scale * rows @ A``, where each row of B has its place among the parts."""

    chosen: Tensor
    scale: float

    @property
    def linear_in(self) -> Any:
        """The module of A, ``[parts * rank, in]``."""

    @property
    def linear_out(self) -> Any:
        """The module of B, ``[out, rank]``."""


def merges_of(chunks: Sequence[GPTModel]) -> Iterator[tuple[str, Merge]]:
    """Yield the canonical name of each weight with an adapter, and the function that makes the merged one of it."""
    for chunk in chunks:
        numbering = numbering_of(chunk)
        for path, module in chunk.named_modules():
            for own, adapter in getattr(getattr(module, "adapter", None), "by_weight", {}).items():
                yield canonical(f"{path}.{own}", numbering), partial(merged_weight, adapter)


@torch.no_grad()
def merged_weight(adapter: Factors, weight: Tensor) -> Tensor:
    """A new tensor with the weight and the product of its adapter, in the dtype and on the device of the weight."""
    first, second = adapter.linear_in.weight, adapter.linear_out.weight
    check_storage({"linear_in of an adapter": first, "linear_out of an adapter": second})
    first, second, chosen = (factor.to(weight.device, torch.float64) for factor in (first, second, adapter.chosen))
    merged = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    rows = max(_BLOCK // (first.shape[0] + first.shape[1]), 1)
    blocks = (tensor.split(rows) for tensor in (merged, second, chosen, weight))
    for block, own, places, old in zip(*blocks, strict=True):
        block.copy_(with_product(old, (places * own[:, None, :]).flatten(1), first, adapter.scale))
    return merged


def with_product(weight: Tensor, left: Tensor, right: Tensor, scale: float) -> Tensor:
    """``weight + scale * left @ right``, of factors in fp64, in the dtype of ``weight`` and rounded once."""
    return _rounded((left @ right).mul_(scale).add_(weight), weight.dtype)


def _rounded(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """fp64 in ``dtype``, rounded once. torch casts to 16 bits by way of fp32, and would round a second time there.

    So the fp32 number is rounded to odd: an inexact one is never a middle between two numbers of 16 bits. What fp32 has
    no room for becomes the last bit that it has room for. (Below 2^-126 fp32 has less room, and may round again.)
    """
    if dtype.itemsize >= torch.float32.itemsize:
        return sums.to(dtype)
    bits = sums.view(torch.int64)
    odd = (bits & _LOW).add_(_LOW).bitwise_or_(bits).bitwise_and_(~_LOW)
    return odd.view(torch.float64).float().to(dtype)
