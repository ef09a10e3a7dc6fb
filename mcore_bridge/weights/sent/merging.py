"""Merges adapters into weights: new tensors that an export makes of this rank's shards, one after the other.

A merge needs no other shard, except for DoRA: if ranks have parts of a row, they add up the squares of their parts
before an export. Sums are in fp64 and rounded once, so that bits do not depend on how a weight is cut. (A sum within
about 2^-50 of a boundary of rounding could differ, if kernels add in another order.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from mcore_bridge.errors import ExportError
from mcore_bridge.weights.model_tensors import adapted
from mcore_bridge.weights.transfer.collectives import Group
from mcore_bridge.weights.transfer.endpoints import Merge, check_storage
from mcore_bridge.weights.transfer.failures import raise_on_all
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
    """The factors of an adapter for a merge: ``scale * rows @ A``, with each row of B at the columns of its part.

    The adapter of experts holds the factors of all of them, ``[experts, ...]``.
    """

    chosen: Tensor
    scale: float
    group: Any
    magnitude: Any
    """The module of the magnitudes of DoRA, ``[out]``, or None."""
    has_cut_rows: bool
    """Whether ranks of ``group`` have parts of one row."""

    def has_row(self) -> Tensor:
        """Whether each row has an adapter. bool ``[out]``."""

    @property
    def linear_in(self) -> Any:
        """The module of A, ``[..., parts * rank, in]``."""

    @property
    def linear_out(self) -> Any:
        """The module of B, ``[..., out, rank]``."""


@dataclass(frozen=True)
class AdapterMerge:
    """Merges an adapter into a shard of its weight.

    Attributes:
        adapter: the adapter.
        expert: the place of the weight's expert in the factors; None for an adapter of one weight.
        squares: for DoRA, the squares of the lengths of the shard's rows in fp64. None: rows are whole on this rank.
    """

    adapter: Factors
    expert: int | None = None
    squares: Tensor | None = None

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        """A and B, ``[parts * rank, in]`` and ``[out, rank]``."""
        first, second = self.adapter.linear_in.weight, self.adapter.linear_out.weight
        return (first, second) if self.expert is None else (first[self.expert], second[self.expert])

    @property
    def lacks_squares(self) -> bool:
        """Whether DoRA needs the squares of other ranks first."""
        return self.adapter.magnitude is not None and self.adapter.has_cut_rows and self.squares is None

    def __call__(self, weight: Tensor) -> Tensor:
        """The merged weight, as a new tensor.

        Raises:
            ExportError: this needs the squares of other ranks, and this export does not communicate.
        """
        if self.lacks_squares:
            raise ExportError(
                "a merge of DoRA needs the lengths of rows that tensor-parallel ranks share, and this export does not "
                "communicate: use iter_hf_weights or save_hf_checkpoint"
            )
        return merged_weight(self, weight)


def merges_of(chunks: Sequence[GPTModel]) -> Iterator[tuple[str, AdapterMerge]]:
    """Yield the canonical name of each weight with an adapter, and the function that merges the weight."""
    for chunk in chunks:
        for names, adapter in adapted(chunk):
            places = range(len(names)) if adapter.expert else (None,)
            yield from ((name, AdapterMerge(adapter, place)) for name, place in zip(names, places, strict=True))


def with_squares(group: Group, merges: Mapping[str, Merge], tensors: Mapping[str, Tensor]) -> Mapping[str, Merge]:
    """The merges, with all squares of lengths. All ranks of ``group`` call it together; ranks of one row communicate.

    Raises:
        ExportError: on every rank, if a rank has no memory for it.
    """
    of_adapters = ((name, merge) for name, merge in merges.items() if isinstance(merge, AdapterMerge))
    lacking = {name: merge for name, merge in of_adapters if merge.lacks_squares}
    if not lacking:
        return merges
    with raise_on_all(group, kind=ExportError):
        own = {name: squares_of(merge, tensors[name].detach()) for name, merge in lacking.items()}
    sharing = Group(next(iter(lacking.values())).adapter.group)  # experts have no DoRA
    sums = torch.stack(sharing.gather(torch.cat([*own.values()]).to(sharing.device))).sum(0)
    parts = sums.split([len(squares) for squares in own.values()])
    summed = {name: replace(lacking[name], squares=part) for name, part in zip(own, parts, strict=True)}
    return {**merges, **summed}


@torch.no_grad()
def merged_weight(merge: AdapterMerge, weight: Tensor) -> Tensor:
    """A new tensor with the weight and its adapter, in the dtype and on the device of the weight."""
    adapter, squares = merge.adapter, merge.squares
    merged, start = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device), 0
    factor = None
    if adapter.magnitude is not None:
        squares = squares_of(merge, weight) if squares is None else squares.to(weight.device)
        factor = factor_of_rows(adapter.magnitude.weight, squares, adapter.has_row())
    for old, left, right in _blocks(merge, weight):
        block = slice(start, start := start + len(old))
        merged[block] = with_product(old, left, right, adapter.scale, None if factor is None else factor[block])
    return merged


@torch.no_grad()
def squares_of(merge: AdapterMerge, weight: Tensor) -> Tensor:
    """The squares of the lengths of this shard's rows of the weight with its adapter, in fp64. ``[rows]``."""
    blocks, scale = _blocks(merge, weight), merge.adapter.scale
    return torch.cat([squares_with_product(old, left, right, scale) for old, left, right in blocks])


def _blocks(merge: AdapterMerge, weight: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield some rows of the weight at a time, with the fp64 factors of the product that is added to them."""
    first, second = merge.factors
    check_storage({"linear_in of an adapter": first, "linear_out of an adapter": second})
    first, second, chosen = (
        factor.to(weight.device, torch.float64) for factor in (first, second, merge.adapter.chosen)
    )
    rows = max(_BLOCK // (first.shape[0] + first.shape[1]), 1)
    for own, places, old in zip(*(tensor.split(rows) for tensor in (second, chosen, weight)), strict=True):
        yield old, (places * own[:, None, :]).flatten(1), first


def squares_with_product(weight: Tensor, left: Tensor, right: Tensor, scale: float) -> Tensor:
    """The squares of the lengths of the rows of ``weight + scale * left @ right``, in fp64."""
    return (left @ right).mul_(scale).add_(weight).square_().sum(1)


def factor_of_rows(magnitude: Tensor, squares: Tensor, has_row: Tensor | bool = True) -> Tensor:
    """The factor of each row with DoRA, in fp64: its magnitude over its length, and 1 where there is no adapter."""
    factor = magnitude.to(squares) / squares.sqrt()
    return torch.where(torch.as_tensor(has_row, device=squares.device), factor, 1)


def with_product(weight: Tensor, left: Tensor, right: Tensor, scale: float, factor: Tensor | None = None) -> Tensor:
    """``factor * (weight + scale * left @ right)``, computed in fp64, and rounded once to the dtype of ``weight``.

    Args:
        left, right: the factors of an adapter, in fp64.
        factor: of each row, in fp64; None: 1.
    """
    changed = (left @ right).mul_(scale).add_(weight)
    return _rounded(changed if factor is None else changed.mul_(factor[:, None]), weight.dtype)


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
