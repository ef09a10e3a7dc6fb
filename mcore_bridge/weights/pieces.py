"""What a rank holds of each HF tensor, and where it is there: for those who fetch weights themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from mcore_bridge.errors import ExportError
from mcore_bridge.weights.bound import Models, bind, noted
from mcore_bridge.weights.exchange import check_storage
from mcore_bridge.weights.mapping import unstacked
from mcore_bridge.weights.pending import is_pending
from mcore_bridge.weights.provenance import HF, Dialect
from mcore_bridge.weights.trace import Copy, Shape


@dataclass(frozen=True, slots=True)
class HeldPiece:
    """``whole[index] == tensor``, where ``whole`` is the HF tensor ``name`` of ``shape``.

    ``tensor`` is a view of the live parameter, in the orientation of HF: it changes with the parameter, is not always
    contiguous, and is only to be read.
    """

    name: str
    shape: Shape
    index: tuple[slice, ...]
    tensor: Tensor


def iter_hf_pieces(
    models: Models, *, hf: HF | None = None, head: str = "lm", dialect: Dialect | None = None
) -> Iterator[HeldPiece]:
    """Yield what this rank holds of each HF tensor. Nothing is copied and nothing communicates.

    The pieces of all ranks of a model replica make up every HF tensor; what several ranks hold, each of them yields.
    Each parameter comes as few slices as its layout allows: one, or one for each group of heads that q, k and v share.

    Args:
        models: this rank's chunks, wrapped or not.
        hf, head: for models that ``build_model`` did not make: their HF config or folder, and their head.
        dialect: how HF names the experts, as for ``iter_hf_weights``.

    Raises:
        MappingError: when it is not known where models come from, or a parameter has no rule.
        ExportError: when a parameter has no storage, or with ``overlap_param_gather`` a step of the optimizer may have
            left parameters for the next forward to gather (also before the first one).
    """
    if is_pending(models):
        raise ExportError(
            "replicas may have yet to gather what a step changed, and nothing communicates here: on all of them, call "
            "start_param_sync(force_sync=True) of each model first"
        )
    bound = bind(models, noted(models, hf, head), dialect=dialect)
    check_storage(bound.tensors)
    for mcore, tensor in bound.tensors.items():
        binding = bound.mapping.bind(mcore)
        if not binding.exported:  # another parameter is the same HF tensor
            continue
        traced = bound.trace(binding)
        for copy in traced.to_mcore:
            if copy.shard == bound.ranks[binding.axis]:
                shape, held = traced.part_shapes[copy.part], copy.of_shard(tensor.detach())
                for name in (binding.hf[copy.part], *(binding.copies if copy.part == 0 else ())):
                    yield _piece(name, shape, copy, held, bound.axes["experts"])


def _piece(name: str, shape: Shape, copy: Copy, held: Tensor, num_experts: int) -> HeldPiece:
    index = [slice(None)] * len(shape)
    stop = copy.part_start + (copy.size - 1) * copy.part_step + 1
    index[copy.part_dim] = slice(copy.part_start, stop, copy.part_step)
    tensor = held if copy.view is None else (~copy.view)((held,), {})[0]
    whole, number = unstacked(name)
    if number is None:
        return HeldPiece(name, shape, tuple(index), tensor)
    return HeldPiece(whole, (num_experts, *shape), (slice(number, number + 1), *index), tensor[None])
