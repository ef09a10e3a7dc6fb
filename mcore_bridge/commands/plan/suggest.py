"""Suggests meshes for a model and a number of GPUs: the meshes that fit into memory, the best first.

Each mesh of the search passes the checks of ``build_model``, and its memory is estimated from counted parameters. The
best meshes are then planned in full, with the ``GPTModel`` that megatron-core builds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mcore_bridge.commands.options import BANDWIDTH, Batch
from mcore_bridge.commands.plan.cost import cost_of
from mcore_bridge.commands.plan.mesh_plan import plan_mesh
from mcore_bridge.commands.plan.tables import blueprint_of
from mcore_bridge.commands.plan.training_memory import (
    TrainingMemory,
    counted_sizes,
    rank_sizes,
    training_memory,
)
from mcore_bridge.config.mesh.parallel_dims import ParallelDims
from mcore_bridge.errors import BridgeError, MeshError
from mcore_bridge.weights.provenance import provenance_of

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from mcore_bridge.factory.blueprint import Blueprint, BuildOptions

AXES = ("tp", "pp", "cp", "ep", "etp")
"""The axes that are searched; context parallelism stays 1 unless its size is given."""
NODE = 8
"""Tensor parallelism stays within a node of so many GPUs."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A mesh that fits.

    Attributes:
        mesh: as of ``verify``.
        dp: data parallel size.
        edp: data parallel size of the experts.
        memory: bytes of the fullest rank.
        export_seconds: as of ``plan``.
    """

    mesh: ParallelDims
    dp: int
    edp: int
    memory: TrainingMemory
    export_seconds: float


@dataclass(frozen=True, slots=True)
class TooLarge:
    """A mesh that needs more memory than a GPU has.

    Attributes:
        mesh: as of ``verify``.
        bytes: the memory of the fullest rank.
    """

    mesh: ParallelDims
    bytes: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The meshes that are refused for one reason.

    Attributes:
        reason: the message of the error.
        meshes: each as of ``verify``.
    """

    reason: str
    meshes: tuple[ParallelDims, ...]


@dataclass(frozen=True, slots=True)
class Search:
    """The meshes that were compared for a number of GPUs.

    Attributes:
        gpus: ranks of the whole job.
        gpu_bytes: the bytes that a GPU may hold.
        batch: the batch of one step on one replica.
        suggestions: meshes that fit, best first.
        too_large: meshes that do not fit, the smallest first.
        refused: meshes that cannot be built, by reason.
        has_experts: whether the model has routed experts.
    """

    gpus: int
    gpu_bytes: int
    batch: Batch
    suggestions: tuple[Suggestion, ...]
    too_large: tuple[TooLarge, ...]
    refused: tuple[Refused, ...]
    has_experts: bool = field(repr=False)


def meshes(num_gpus: int, config: TransformerConfig, given: Mapping[str, int]) -> Iterator[ParallelDims]:
    """All meshes whose sizes divide the GPUs, with sequence parallelism wherever there is tensor parallelism.

    Args:
        num_gpus: ranks of the whole job.
        config: the config of the model.
        given: sizes that are not searched, by axis.
    """
    sizes = [size for size in range(1, num_gpus + 1) if num_gpus % size == 0]
    num_experts = config.num_moe_experts
    choices = {
        "tp": [size for size in sizes if size <= NODE],
        "pp": [size for size in sizes if size <= config.num_layers],
        "cp": [1],
        "ep": [size for size in sizes if num_experts and num_experts % size == 0] or [1],
        "etp": [size for size in sizes if size <= NODE] if num_experts else [1],
    } | {axis: [size] for axis, size in given.items()}
    for values in product(*choices.values()):
        tp, pp, cp, ep, etp = values
        is_whole = num_gpus % (tp * pp * cp) == 0 and num_gpus % (etp * ep * pp) == 0
        if is_whole and (etp in (1, tp) or "etp" in given):
            yield ParallelDims(tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, sp=tp > 1, layout="balanced" if pp > 1 else None)


def suggest(
    folder: Path,
    num_gpus: int,
    options: BuildOptions,
    *,
    gpu_bytes: float,
    given: Mapping[str, int],
    batch: Batch,
    dtype: torch.dtype | None = None,
    count: int = 5,
    bandwidth: float = BANDWIDTH,
    on_plan: Callable[[int, ParallelDims], object] = lambda number, dims: None,
) -> Search:
    """The best meshes for a model.

    The best mesh has the fewest ranks in a replica, as each of them adds communication to every layer. Then come the
    fewest pipeline ranks, the fewest ranks that share experts, and the least memory.

    Args:
        folder: with a config.json.
        num_gpus: ranks of the whole job.
        options: options of the build. Mesh, device and head are replaced.
        gpu_bytes: the bytes that a GPU may hold.
        given: sizes that are not searched, by axis.
        batch: the batch of one step on one replica.
        dtype: the dtype of the parameters. None: the dtype in the config, or bfloat16.
        count: the number of suggestions at most.
        bandwidth: GB/s that a rank receives in an export.
        on_plan: called before a mesh is planned in full, with the number of suggestions so far.

    Raises:
        ConfigError: the model cannot be built on any mesh.
        MeshError: the given sizes do not divide the GPUs.
    """

    provenance = provenance_of(folder, head=None)

    def made(dims: ParallelDims) -> Blueprint:
        return blueprint_of(provenance, replace(options, dims=dims), dtype=dtype)

    single = made(ParallelDims())
    provenance = provenance.seeing(options.vision, single.provenance.tower)  # every mesh has the same tower
    candidates, refused = _candidates(made, meshes(num_gpus, single.config, given))
    if not candidates and not refused:
        sizes = ", ".join(f"{axis}={size}" for axis, size in given.items())
        raise MeshError(f"{sizes} must divide {num_gpus} GPUs: leave sizes out to search them, or change the GPUs")
    counts = single.counts

    def order(blueprint: Blueprint) -> tuple[int, ...]:
        memory = training_memory(blueprint, counted_sizes(blueprint, counts), world_size=num_gpus, batch=batch).total
        dims = blueprint.dims
        return memory > gpu_bytes, dims.model_size, dims.pp, dims.ep * dims.etp, memory

    keyed = sorted(((order(blueprint), blueprint) for blueprint in candidates), key=lambda pair: pair[0])
    suggestions: list[Suggestion] = []
    too_large = [TooLarge(blueprint.dims, key[-1]) for key, blueprint in keyed if key[0]]
    for key, blueprint in keyed:
        if key[0] or len(suggestions) == count:
            break
        on_plan(len(suggestions), blueprint.dims)
        suggestion = _planned(blueprint, num_gpus, batch, bandwidth)
        if suggestion.memory.total > gpu_bytes:
            too_large.append(TooLarge(blueprint.dims, suggestion.memory.total))
        else:
            suggestions.append(suggestion)
    too_large.sort(key=lambda mesh: mesh.bytes)
    has_experts = bool(single.config.num_moe_experts)
    return Search(num_gpus, int(gpu_bytes), batch, tuple(suggestions), tuple(too_large), refused, has_experts)


def _planned(blueprint: Blueprint, num_gpus: int, batch: Batch, bandwidth: float) -> Suggestion:
    mesh_plan = plan_mesh(blueprint, world_size=num_gpus)
    memory = training_memory(blueprint, rank_sizes(mesh_plan), world_size=num_gpus, batch=batch)
    dims, seconds = blueprint.dims, cost_of(mesh_plan.export, bandwidth=bandwidth).seconds
    return Suggestion(dims, dims.dp(num_gpus), dims.edp(num_gpus), memory, seconds)


def _candidates(
    make: Callable[[ParallelDims], Blueprint], meshes: Iterable[ParallelDims]
) -> tuple[list[Blueprint], tuple[Refused, ...]]:
    """Blueprints of the meshes that ``build_model`` accepts; and the reasons why it refuses others."""
    accepted: list[Blueprint] = []
    refused: dict[str, list[ParallelDims]] = {}
    for dims in meshes:
        try:
            accepted.append(make(dims))
        except BridgeError as error:
            refused.setdefault(str(error), []).append(dims)
    return accepted, tuple(Refused(reason, tuple(meshes)) for reason, meshes in refused.items())
