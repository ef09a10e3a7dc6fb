"""Merges adapters into weights: new tensors that an export makes of this rank's shards, one after the other.

A merge needs no other shard. Sums are in fp64 and rounded once, so that bits do not depend on how a weight is cut. (A
sum within about 2^-50 of a boundary of rounding could differ, if kernels add in another order.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from mcore_bridge.rules.names import canonical
from mcore_bridge.weights.model_chunks import numbering_of
from mcore_bridge.weights.transfer.endpoints import Merge, check_storage
from mcore_bridge.weights.transfer.quantized_parameters import is_quantized, of_other_classes, values_of

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

_BLOCK = 1 << 22
"""How many fp64 numbers a merge holds at once, about 32 MB for each tensor."""
_LOW = (1 << 29) - 1
"""The bits of an fp64 fraction that do not fit into fp32."""


def of_values(tensors: Mapping[str, Tensor], merges: Mapping[str, Merge]) -> dict[str, Merge]:
    """``merges``, and before them a function for each quantized tensor that gives its values."""
    held = of_other_classes(tensors).items()
    return {**merges, **{name: partial(_merged, merges.get(name)) for name, tensor in held if is_quantized(tensor)}}


def _merged(merge: Merge | None, tensor: Tensor) -> Tensor:
    values = values_of(tensor)
    return values if merge is None else merge(values)


class Factors(Protocol):
    """The factors of an adapter for a merge: ``scale * rows @ A``, with each row of B at the columns of its part."""

    chosen: Tensor
    scale: float

    @property
    def linear_in(self) -> Any:
        """The module of A, ``[parts * rank, in]``."""

    @property
    def linear_out(self) -> Any:
        """The module of B, ``[out, rank]``."""


def merges_of(chunks: Sequence[GPTModel]) -> Iterator[tuple[str, Merge]]:
    """Yield the canonical name of each weight with an adapter, and the function that merges the weight."""
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
    """``weight + scale * left @ right``, computed from factors in fp64, and rounded once to the dtype of ``weight``."""
    return _rounded((left @ right).mul_(scale).add_(weight), weight.dtype)


def _rounded(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Round fp64 numbers once to ``dtype``. torch casts to 16 bits through fp32, and would round twice.

    So the first rounding is "round to odd": if bits do not fit into fp32, its last bit is set. Then an inexact number
    never lies in the middle between two numbers of 16 bits. (Below 2^-126 fp32 has fewer bits, and may round twice.)
    """
    if dtype.itemsize >= torch.float32.itemsize:
        return sums.to(dtype)
    bits = sums.view(torch.int64)
    odd = (bits & _LOW).add_(_LOW).bitwise_or_(bits).bitwise_and_(~_LOW)
    return odd.view(torch.float64).float().to(dtype)
