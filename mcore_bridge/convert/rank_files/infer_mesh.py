"""Infers the mesh of files in Megatron's ``torch`` format, and the canonical names of their parameters.

This is the inverse of ``file_layout.py``. No file states the sizes of the mesh: they follow from names, numbers of
layers and sizes of experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import count, islice

from torch import Tensor

from mcore_bridge.convert.rank_files.file_layout import RankFile
from mcore_bridge.errors import CheckpointError
from mcore_bridge.rules.names import EMBEDDING, Numbering, canonical, layer_of, mtp_layer_of

Models = Mapping[str, Mapping[str, Tensor]]
"""The parameters of a file, by the key of their chunk and by their names in the chunk."""
Named = Mapping[str, Tensor]
"""The parameters of a file by canonical name."""
_ENDS = (EMBEDDING, "decoder.final_layernorm.weight")
"""Parameters that only the first and only the last stage of a pipeline have."""
_FILE = re.compile(r"^mp_rank_([0-9]{2,9})(?:_([0-9]{3,9}))?(?:_([0-9]{3,9}))?$")
_EXPERT = re.compile(r"\.experts\.(?:local_experts\.0\.linear_fc2\.weight|linear_fc2\.weight0)$")


def files_of(models_by_file: Mapping[str, Models], expert_size: int | None) -> tuple[RankFile, ...]:
    """The places of files on the mesh, from their names.

    If a name has two numbers, the second is the pipeline stage if some file lacks the first or last parameters of the
    model.

    Args:
        models_by_file: the content of each file, by its name.
        expert_size: the inner dim of an expert that is not cut.

    Raises:
        CheckpointError: files are missing.
    """
    staged = any(end not in names for names in map(_all_names, models_by_file.values()) for end in _ENDS)
    etp = _expert_tp(models_by_file, expert_size)
    files = []
    for name in models_by_file:
        match = _FILE.match(name)
        if match is None:
            raise CheckpointError(f"expected the names of files to have the form mp_rank_00_000_000, found {name}")
        tp, *others = (int(number) for number in match.groups() if number)
        pp = others.pop(0) if staged and others else 0
        files.append(RankFile(name, tp, pp, others[0] if others else 0, tp % etp))
    for axis_rank in ("tp_rank", "pp_rank", "ep_rank"):
        ranks = {getattr(file, axis_rank) for file in files}
        if len(ranks) <= max(ranks):
            absent = list(islice((rank for rank in count() if rank not in ranks), min(8, 1 + max(ranks) - len(ranks))))
            raise CheckpointError(f"it has no file for {axis_rank} {absent}")
    return tuple(files)


def _all_names(models: Models) -> set[str]:
    return {name for state in models.values() for name in state}


def _expert_tp(models_by_file: Mapping[str, Models], expert_size: int | None) -> int:
    """The expert tensor parallel size."""
    states = (state for models in models_by_file.values() for state in models.values())
    weights = (tensor for state in states for name, tensor in state.items() if _EXPERT.search(name))
    sizes = (tensor.shape[1] for tensor in weights if tensor.dim() == 2 and tensor.numel())
    return max(1, (expert_size or 0) // next(sizes, 1 << 62))


def named(files: Sequence[RankFile], models_by_file: Mapping[str, Models], num_experts: int) -> tuple[Named, ...]:
    """The parameters of each file by canonical name.

    Args:
        models_by_file: the content of each file, by its name.
        num_experts: experts of a layer in each file.

    Raises:
        CheckpointError: files of one stage differ in their layers, or a file holds more experts than its share.
    """
    counts: dict[tuple[int, int], int] = {}
    for file in files:
        for model, state in models_by_file[file.name].items():
            num_layers = _count(map(layer_of, state))
            if counts.setdefault((_chunk(model), file.pp_rank), num_layers) != num_layers:
                raise CheckpointError(
                    f"{file.name} holds {num_layers} layers in {model}, other files of its stage do not"
                )
    starts = {stage: sum(count for other, count in counts.items() if other < stage) for stage in counts}
    return tuple(_named(file, models_by_file[file.name], starts, num_experts) for file in files)


def _named(file: RankFile, models: Models, starts: Mapping[tuple[int, int], int], num_experts: int) -> Named:
    experts = range(file.ep_rank * num_experts, (file.ep_rank + 1) * num_experts)
    held: dict[str, Tensor] = {}
    for model, state in models.items():
        start = starts[_chunk(model), file.pp_rank]
        layers = range(start, start + _count(map(layer_of, state)))
        numbering = Numbering(tuple(layers), tuple(experts), tuple(range(_count(map(mtp_layer_of, state)))))
        try:
            held |= {canonical(name, numbering): tensor for name, tensor in state.items()}
        except IndexError:
            raise CheckpointError(f"{file.name} holds more than {num_experts} experts in a layer of {model}") from None
    return held


def _chunk(model: str) -> int:
    """The virtual stage of ``model`` or ``model0``, ``model1`` and so on."""
    return int(model.removeprefix("model") or 0)


def _count(numbers: Iterable[int | None]) -> int:
    """The number of layers, from their numbers, which begin at 0.

    Raises:
        CheckpointError: a number is missing; a number in a damaged name may be very large.
    """
    known = {number for number in numbers if number is not None}
    if known and max(known) >= len(known):
        raise CheckpointError(f"expected layers numbered from 0 on, found {len(known)} of them up to {max(known)}")
    return len(known)
