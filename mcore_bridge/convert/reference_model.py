"""The parameters of a model without parallelism, and their keys in megatron-core's checkpoints.

Both are read from a real ``GPTModel`` on the meta device, in this process. So keys match the installed release.
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
from mcore_bridge.rules.variants import expert_format_of
from mcore_bridge.weights.bound import bind
from mcore_bridge.weights.dist_checkpoint.compare import sharded_states
from mcore_bridge.weights.dist_checkpoint.extra_state import with_extra_states
from mcore_bridge.weights.dist_checkpoint.files import ChunkLocation, LocatedParam
from mcore_bridge.weights.dist_checkpoint.fit_state import respell
from mcore_bridge.weights.dist_checkpoint.folder import CONTENT
from mcore_bridge.weights.plan.inventory import ParamEntry, merge_inventories
from mcore_bridge.weights.provenance import Provenance

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class WholeModel:
    """All parameters of a model in order, and their locations in a checkpoint in this order (``placed``)."""

    provenance: Provenance
    mapping: WeightMapping
    entries: tuple[ParamEntry, ...]
    placed: tuple[LocatedParam, ...]
    objects: tuple[str, ...]
    """Keys of the empty extra states of modules, without which megatron-core does not load a checkpoint."""


def whole_model(
    hf: Path,
    *,
    dtype: torch.dtype,
    num_mtp_layers: int = 0,
    metadata: Mapping[str, Any] = CONTENT,
    names: Iterable[str] = (),
    vision: str = "text_only",
    hybrid: bool = False,
    head: str = "lm",
) -> WholeModel:
    """Build a model without storage, and read its parameters and their locations from it.

    Args:
        hf: folder of the HF config.
        dtype: the dtype of the parameters.
        num_mtp_layers: MTP layers to build.
        metadata: the spelling of keys, for megatron-core's ``sharded_state_dict``.
        names: names of HF tensors, which determine the expert format; without names, ``hf`` does.
        vision: as for ``build_model``.
        hybrid: whether the checkpoint is from a ``HybridModel``.
        head: as for ``build_model``.
    """
    from megatron.core import parallel_state

    from mcore_bridge.factory.build import build_model

    dims = ParallelDims()
    with rank_of(dims, 0, 1):
        overrides = {"mtp_num_layers": num_mtp_layers or None}
        meta: dict[str, Any] = {"device": "meta", "backend": "torch", "load_weights": False}
        (chunk,) = build_model(hf, dims=dims, dtype=dtype, head=head, overrides=overrides, vision=vision, **meta)
        bound = bind(chunk, expert_format=expert_format_of(names, chunk.bridge.rules))
        entries = merge_inventories(bound.mapping, bound.axes, chunk.config.num_layers, [bound.inventory()])
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        states = sharded_states([chunk], {**metadata, "dp_cp_group": group})
        respell(states, chunk, hybrid=hybrid)
        state = with_extra_states(states["model"])
    objects = tuple(value.unique_key for value in state.values() if hasattr(value, "unique_key"))
    sharded = {id(value.data): value for value in state.values() if not hasattr(value, "unique_key")}
    placed = tuple(_placed(number, entry, bound.tensors, sharded) for number, entry in enumerate(entries))
    return WholeModel(chunk.bridge, bound.mapping, entries, placed, objects)


def _placed(number: int, entry: ParamEntry, tensors: Mapping[str, Tensor], sharded: Mapping[int, Any]) -> LocatedParam:
    chunks = tuple(_chunks(sharded[id(tensors[entry.held.name])], entry.held.shape))
    if sum(stop - start for start, stop in (location.rows for location in chunks)) != (entry.held.shape or (1,))[0]:
        raise CheckpointError(f"sharded_state_dict gives no location for a part of {entry.held.name}; report this")
    return LocatedParam(number, entry.held.shape, entry.held.dtype, chunks)


def _chunks(sharded: Any, shape: Sequence[int]) -> Iterator[ChunkLocation]:
    """Yield the locations of the rows of a parameter.

    If megatron-core splits the parameter with a function, we pass row numbers to the function in place of values.
    """
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
            raise CheckpointError(f"{leaf.key} has rows of a parameter in another order; report this")
        yield ChunkLocation(leaf.key, leaf.global_shape, leaf.global_offset, (start, start + len(column)))
