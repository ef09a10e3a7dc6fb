"""Slices of whole HF tensors for a rank of an engine, cut without communication."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from mcore_bridge.rules.layout import Axes
from mcore_bridge.rules.mapping import WeightMapping, unstacked
from mcore_bridge.weights.plan.engine_slices import Indices, Slicer, dims_of
from mcore_bridge.weights.plan.inventory import ParamEntry
from mcore_bridge.weights.plan.target import EngineRank


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """The slice of one HF tensor for a rank of an engine.

    Args:
        name: the name of the slice.
        experts: the experts of the slice, if one HF tensor has all experts of a layer; otherwise None.
        dim: the dim that is cut.
        ranges: start and end of each range of indices along ``dim``.
    """

    name: str
    experts: range | None
    dim: int
    ranges: tuple[tuple[int, int], ...]

    def of(self, whole: Tensor) -> Tensor:
        """Cut the slice from the whole tensor. It is contiguous, and a view if possible."""
        dim = self.dim
        if self.experts is not None:
            whole, dim = whole[self.experts.start : self.experts.stop], dim + 1
        parts = [whole.narrow(dim, start, end - start) for start, end in self.ranges]
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim)


def slices_of(
    target: EngineRank, mapping: WeightMapping, axes: Axes, num_layers: int, entries: Sequence[ParamEntry]
) -> Mapping[str, TensorSlice]:
    """The slices that an export to ``target`` would yield, by the names of the HF tensors.

    Args:
        entries: all parameters of the model, whole.

    Raises:
        TargetError: when the model cannot be cut for the target.
    """
    slicer = Slicer(target, mapping, axes, num_layers)
    experts = target.experts(axes["experts"])
    by_name: dict[str, TensorSlice] = {}
    for entry in entries:
        if (named := slicer.named(entry)) is None:
            continue
        slices = [
            TensorSlice(unstacked(name)[0], experts if entry.stack else None, dim, tuple(_ranges(taken)))
            for name, dim, taken in zip(named.hf, dims_of(entry.trace), slicer.taken(named), strict=True)
        ]
        by_name.update((unstacked(hf)[0], part) for hf, part in zip(entry.hf, slices, strict=True))
        by_name.update((name, replace(slices[0], name=name)) for name in named.copies)
    return by_name


def _ranges(indices: Indices) -> Iterator[tuple[int, int]]:
    """Yield start and end of each range of consecutive indices; one empty range if there are none."""
    for run in np.split(indices, np.flatnonzero(np.diff(indices) != 1) + 1):
        yield (int(run[0]), int(run[-1]) + 1) if len(run) else (0, 0)
