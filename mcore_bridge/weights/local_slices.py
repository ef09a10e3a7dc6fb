"""The slices of HF tensors that a rank holds, without communication: for callers that transfer weights themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from torch import Tensor

from mcore_bridge.rules.mapping import Dialect, unstacked
from mcore_bridge.rules.trace import Copy, Shape
from mcore_bridge.weights.bound import BoundModel, Models, bind, provenance_on
from mcore_bridge.weights.param_sync import require_gathered
from mcore_bridge.weights.provenance import HF
from mcore_bridge.weights.transfer.endpoints import check_storage


@dataclass(frozen=True, slots=True)
class LocalSlice:
    """A slice of the HF tensor ``name`` of ``shape``: ``whole[index] == tensor``.

    ``tensor`` is a view of the live parameter, in the orientation of HF. It changes with the parameter, is not always
    contiguous, and must not be written. With a merged adapter, ``tensor`` is a view of a new tensor.
    """

    name: str
    shape: Shape
    index: tuple[slice, ...]
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class SliceOrigin:
    """The part of the parameter ``mcore`` that is the slice ``index`` of the HF tensor ``name`` of ``shape``."""

    name: str
    shape: Shape
    index: tuple[slice, ...]
    mcore: str
    copy: Copy
    is_stacked: bool
    """Whether the HF tensor has a leading dim for experts, which the slice lacks."""

    def of(self, parameter: Tensor) -> Tensor:
        """The slice as a view of the parameter, in the orientation of HF."""
        held = self.copy.of_shard(parameter.detach())
        part = held if self.copy.view is None else (~self.copy.view)((held,), {})[0]
        return part[None] if self.is_stacked else part


def iter_hf_pieces(
    models: Models,
    *,
    hf: HF | None = None,
    head: str = "lm",
    dialect: Dialect | None = None,
    merged: bool | None = None,
) -> Iterator[LocalSlice]:
    """Yield the slices of HF tensors that this rank holds. Nothing is copied and nothing communicates.

    The slices of all ranks of a model replica make up every HF tensor. If several ranks hold a slice, each rank yields
    it. A parameter gives as few slices as its layout allows: one, or one for each group of heads that q, k and v share.

    Args:
        models: this rank's chunks, wrapped or not.
        hf, head: deprecated; call ``adopt`` once for models that ``build_model`` did not make.
        dialect: how HF names the experts, as for ``iter_hf_weights``.
        merged: whether adapters are merged, as for ``iter_hf_weights``.

    Raises:
        MappingError: when the provenance of models is unknown, or a parameter has no rule.
        ExportError: when a parameter has no storage. With ``overlap_param_gather``, also before the first forward, and
            when the next forward may still have to gather parameters.

    Example:
        >>> for piece in mb.iter_hf_pieces(models):
        ...     if piece.name == "lm_head.weight":
        ...         print(piece.index, tuple(piece.tensor.shape))
        (slice(0, 96, 1), slice(None, None, None)) (96, 48)
    """
    require_gathered(models)
    bound = bind(models, provenance_on(models, hf, head), dialect=dialect, merged=merged)
    check_storage(bound.tensors)
    for mcore, origins in groupby(origins_of(bound), key=attrgetter("mcore")):
        held = bound.exported(mcore)
        for origin in origins:
            yield LocalSlice(origin.name, origin.shape, origin.index, origin.of(held))


def origins_of(bound: BoundModel) -> Iterator[SliceOrigin]:
    """Yield the origins of all slices that a rank holds, parameter by parameter."""
    for mcore in bound.tensors:
        binding = bound.mapping.bind(mcore)
        if not binding.exported:  # another parameter has this HF tensor
            continue
        traced = bound.trace(binding)
        for copy in traced.to_mcore:
            if copy.shard == bound.ranks[binding.axis]:
                for name in (binding.hf[copy.part], *(binding.copies if copy.part == 0 else ())):
                    yield _origin(name, traced.part_shapes[copy.part], copy, mcore, bound.axes["experts"])


def _origin(name: str, shape: Shape, copy: Copy, mcore: str, num_experts: int) -> SliceOrigin:
    index = [slice(None)] * len(shape)
    stop = copy.part_start + (copy.size - 1) * copy.part_step + 1
    index[copy.part_dim] = slice(copy.part_start, stop, copy.part_step)
    whole, number = unstacked(name)
    if number is None:
        return SliceOrigin(name, shape, tuple(index), mcore, copy, is_stacked=False)
    return SliceOrigin(whole, (num_experts, *shape), (slice(number, number + 1), *index), mcore, copy, is_stacked=True)
