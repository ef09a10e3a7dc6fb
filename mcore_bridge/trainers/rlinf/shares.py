"""What a rank of an engine takes of HF tensors that are there whole: cut where they are, without communication."""

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
    """What is taken of one HF tensor.

    Args:
        name: of what is taken.
        experts: which experts, where one HF tensor holds all of a layer; None where it does not.
        dim: that is cut.
        stretches: start and end of what is taken along ``dim``.
    """

    name: str
    experts: range | None
    dim: int
    stretches: tuple[tuple[int, int], ...]

    def of(self, whole: Tensor) -> Tensor:
        """The share of a tensor: contiguous, and a view where it is one stretch of memory."""
        dim = self.dim
        if self.experts is not None:
            whole, dim = whole[self.experts.start : self.experts.stop], dim + 1
        parts = [whole.narrow(dim, start, end - start) for start, end in self.stretches]
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim)


def slices_of(
    target: EngineRank, mapping: WeightMapping, axes: Axes, num_layers: int, entries: Sequence[ParamEntry]
) -> Mapping[str, TensorSlice]:
    """By the name of each HF tensor of which ``target`` takes any, what it takes: what an export to it would yield.

    Args:
        entries: all parameters of the model, whole.

    Raises:
        TargetError: when the model cannot be cut so.
    """
    slicer = Slicer(target, mapping, axes, num_layers)
    experts = target.experts(axes["experts"])
    found: dict[str, TensorSlice] = {}
    for entry in entries:
        if (named := slicer.named(entry)) is None:
            continue
        shares = [
            TensorSlice(unstacked(name)[0], experts if entry.stack else None, dim, tuple(_stretches(taken)))
            for name, dim, taken in zip(named.hf, dims_of(entry.trace), slicer.taken(named), strict=True)
        ]
        found.update((unstacked(hf)[0], share) for hf, share in zip(entry.hf, shares, strict=True))
        found.update((name, replace(shares[0], name=name)) for name in named.copies)
    return found


def _stretches(indices: Indices) -> Iterator[tuple[int, int]]:
    """Start and end of each stretch of ascending indices that follow one another; an empty one where there are none."""
    for stretch in np.split(indices, np.flatnonzero(np.diff(indices) != 1) + 1):
        yield (int(stretch[0]), int(stretch[-1]) + 1) if len(stretch) else (0, 0)
