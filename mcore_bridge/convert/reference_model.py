"""What megatron-core says of a model without parallelism: its parameters, and where each lies in a checkpoint.

It is asked of the real ``GPTModel``, on the meta device and in this process alone, so that keys are those of the
installed release.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mcore_bridge.config.mesh.parallel_dims import ParallelDims
from mcore_bridge.errors import CheckpointError
from mcore_bridge.launch.fake_rank import rank_of
from mcore_bridge.rules.mapping import WeightMapping
from mcore_bridge.weights.bound import bind
from mcore_bridge.weights.dist_checkpoint.compare import sharded_states
from mcore_bridge.weights.dist_checkpoint.extra_state import with_extra_states
from mcore_bridge.weights.dist_checkpoint.files import ChunkLocation, LocatedParam
from mcore_bridge.weights.dist_checkpoint.folder import CONTENT
from mcore_bridge.weights.plan.inventory import ParamEntry, merge_inventories
from mcore_bridge.weights.provenance import Provenance, dialect_of

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class WholeModel:
    """All parameters of a model, in order; ``placed`` are their places in a checkpoint, with the same numbers."""

    provenance: Provenance
    mapping: WeightMapping
    entries: tuple[ParamEntry, ...]
    placed: tuple[LocatedParam, ...]
    objects: tuple[str, ...]
    """What modules keep beside tensors: nothing, under these keys, without which megatron-core does not load."""


def whole_model(
    hf: Path,
    *,
    dtype: torch.dtype,
    num_mtp_layers: int = 0,
    metadata: Mapping[str, Any] = CONTENT,
    names: Iterable[str] = (),
) -> WholeModel:
    """Build a model without storage and ask it.

    Args:
        hf: folder of the HF config.
        dtype: of the parameters.
        num_mtp_layers: that are built too.
        metadata: how keys are spelled, as megatron-core's ``sharded_state_dict`` takes it.
        names: of the HF tensors that it is made of, which tell their dialect; without any, ``hf`` does.
    """
    from megatron.core import parallel_state

    from mcore_bridge.factory.build import build_model

    dims = ParallelDims()
    with rank_of(dims, 0, 1):
        overrides = {"mtp_num_layers": num_mtp_layers or None}
        (chunk,) = build_model(
            hf, dims=dims, dtype=dtype, device="meta", backend="torch", overrides=overrides, load_weights=False
        )
        bound = bind(chunk, dialect=dialect_of(names, chunk.bridge.rules))
        entries = merge_inventories(bound.mapping, bound.axes, chunk.config.num_layers, [bound.inventory()])
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        state = with_extra_states(sharded_states([chunk], {**metadata, "dp_cp_group": group})["model"])
    objects = tuple(each.unique_key for each in state.values() if hasattr(each, "unique_key"))
    sharded = {id(each.data): each for each in state.values() if not hasattr(each, "unique_key")}
    placed = tuple(_placed(number, entry, bound.tensors, sharded) for number, entry in enumerate(entries))
    return WholeModel(chunk.bridge, bound.mapping, entries, placed, objects)


def _placed(number: int, entry: ParamEntry, tensors: Mapping[str, Tensor], sharded: Mapping[int, Any]) -> LocatedParam:
    places = tuple(_places(sharded[id(tensors[entry.held.name])], entry.held.shape))
    if sum(stop - start for start, stop in (place.rows for place in places)) != (entry.held.shape or (1,))[0]:
        raise CheckpointError(f"sharded_state_dict does not say where all of {entry.held.name} goes; report this")
    return LocatedParam(number, entry.held.shape, entry.held.dtype, places)


def _places(sharded: Any, shape: Sequence[int]) -> Iterator[ChunkLocation]:
    """Where the rows of a parameter go: what takes a parameter to pieces is shown the numbers of its rows instead."""
    if not hasattr(sharded, "build_fn"):
        padded = sharded.allow_shape_mismatch
        yield ChunkLocation(sharded.key, sharded.global_shape, sharded.global_offset, (0, (*shape, 1)[0]), padded)
        return
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    numbers = torch.arange(shape[0]).view(-1, *(1,) * (len(shape) - 1)).expand(*shape)
    for leaf in nested_values(sharded.build_fn(sharded.key, numbers, sharded.replica_id, None)):
        column = leaf.data[(slice(None), *(0,) * (leaf.data.dim() - 1))]
        start = int(column[0])
        if column.tolist() != list(range(start, start + len(column))):
            raise CheckpointError(f"{leaf.key} takes rows of a parameter in another order; report this")
        yield ChunkLocation(leaf.key, leaf.global_shape, leaf.global_offset, (start, start + len(column)))
