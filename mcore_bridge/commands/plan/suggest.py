"""Suggests meshes for a model and a number of GPUs: the meshes that fit into memory, the best first.

Each mesh of the search passes the checks of ``build_model``, and its memory is estimated from counted parameters. For
the best meshes, the parameters of each stage are then counted in the ``GPTModel`` that megatron-core builds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mcore_bridge.commands.options import BANDWIDTH, NODE, Batch, UsageError
from mcore_bridge.commands.plan.mesh_plan import build_stages
from mcore_bridge.commands.plan.replicas import stage_size
from mcore_bridge.commands.plan.suggest_report import Enough, Refused, Search, Suggestion, TooLarge
from mcore_bridge.commands.plan.tables import blueprint_of
from mcore_bridge.commands.plan.training_memory import (
    counted_sizes,
    rank_sizes,
    training_memory,
)
from mcore_bridge.config.mesh.parallel_dims import ParallelDims
from mcore_bridge.errors import BridgeError
from mcore_bridge.launch.processes import OnEvent
from mcore_bridge.weights.provenance import provenance_of

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from mcore_bridge.factory.blueprint import Blueprint, BuildOptions
    from mcore_bridge.factory.param_count import ParamCounts

AXES = ("tp", "pp", "cp", "ep", "etp")
"""The axes that are searched; context parallelism stays 1 unless its size is given."""
MOST_DOUBLINGS = 5
"""If no mesh fits, up to 32 times as many GPUs are tried."""


def meshes(num_gpus: int, config: TransformerConfig, given: Mapping[str, int], node: int) -> list[ParallelDims]:
    """All meshes whose sizes divide the GPUs, with sequence parallelism wherever there is tensor parallelism.

    Args:
        num_gpus: ranks of the whole job.
        config: the config of the model.
        given: sizes that are not searched, by axis.
        node: GPUs of a node.
    """
    sizes = [size for size in range(1, num_gpus + 1) if num_gpus % size == 0]
    num_experts = config.num_moe_experts
    choices = {
        "tp": [size for size in sizes if size <= node],
        "pp": [size for size in sizes if size <= config.num_layers],
        "cp": [1],
        "ep": [size for size in sizes if num_experts and num_experts % size == 0] or [1],
        "etp": [size for size in sizes if size <= node] if num_experts else [1],
    } | {axis: [size] for axis, size in given.items()}
    searched = []
    for values in product(*choices.values()):
        tp, pp, cp, ep, etp = values
        is_whole = num_gpus % (tp * pp * cp) == 0 and num_gpus % (etp * ep * pp) == 0
        if is_whole and (etp in (1, tp) or "etp" in given):
            layout = "balanced" if pp > 1 else None
            searched.append(ParallelDims(tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, sp=tp > 1, layout=layout))
    return searched


@dataclass(frozen=True, slots=True)
class _SearchedModel:
    """The model of a search, on any mesh.

    Attributes:
        made: makes the blueprint of a mesh once, or raises ``BridgeError``.
        single: the blueprint on one rank.
        counts: its parameters.
    """

    made: Callable[[ParallelDims], Blueprint]
    single: Blueprint
    counts: ParamCounts

    def memory(self, blueprint: Blueprint, num_gpus: int, batch: Batch) -> int:
        """The bytes of the fullest rank, from counted parameters."""
        sizes = counted_sizes(blueprint, self.counts)
        return training_memory(blueprint, sizes, world_size=num_gpus, batch=batch).total

    def fits(self, dims: ParallelDims, num_gpus: int, batch: Batch, gpu_bytes: float) -> bool:
        """Whether a mesh can be built, and fits."""
        try:
            return self.memory(self.made(dims), num_gpus, batch) <= gpu_bytes
        except BridgeError:
            return False


def suggest(
    folder: Path,
    num_gpus: int,
    options: BuildOptions,
    *,
    gpu_bytes: float,
    given: Mapping[str, int],
    batch: Batch,
    gpus_per_node: int = NODE,
    dtype: torch.dtype | None = None,
    count: int = 5,
    bandwidth: float = BANDWIDTH,
    on_event: OnEvent = lambda rank, phase, done, total: None,
) -> Search:
    """The best meshes for a model.

    Experts are best cut by expert parallelism alone, and within a node. Then come the fewest ranks in a replica, as
    each of them adds communication to every layer, the fewest pipeline ranks, and the fewest ranks that share experts.
    Of meshes that differ only in ``ep`` and ``etp``, and not in their product, the best one is suggested.

    Args:
        folder: with a config.json.
        num_gpus: ranks of the whole job.
        options: options of the build. Mesh, device and head are replaced.
        gpu_bytes: the bytes that a GPU may hold.
        given: sizes that are not searched, by axis.
        batch: the batch of one step on one replica.
        gpus_per_node: GPUs that a fast network joins.
        dtype: the dtype of the parameters. None: the dtype in the config, or bfloat16.
        count: the number of suggestions at most.
        bandwidth: GB/s that a rank receives in an export.
        on_event: called with the numbers of checked meshes and of suggestions.

    Raises:
        ConfigError: the model cannot be built on any mesh.
        UsageError: the given sizes do not divide the GPUs.
    """
    model = _model_of(folder, options, dtype)
    config = model.single.config
    searched = meshes(num_gpus, config, given, gpus_per_node)
    if not searched:
        sizes = ", ".join(f"{axis}={size}" for axis, size in given.items())
        raise UsageError(f"{sizes} must divide {num_gpus} GPUs: leave sizes out to search them, or change the GPUs")
    candidates, refused = _candidates(model.made, searched, on_event)

    def order(blueprint: Blueprint) -> tuple[int, ...]:
        memory, dims = model.memory(blueprint, num_gpus, batch), blueprint.dims
        group = dims.ep * dims.etp
        return memory > gpu_bytes, dims.etp > 1, group > gpus_per_node, dims.model_size, dims.pp, group, memory

    keyed = sorted(((order(blueprint), blueprint) for blueprint in candidates), key=lambda pair: pair[0])
    suggestions: dict[ParallelDims, Suggestion] = {}
    too_large = [TooLarge(blueprint.dims, key[-1]) for key, blueprint in keyed if key[0]]
    for key, blueprint in keyed:
        if key[0] or len(suggestions) == count:
            break
        if (twins := replace(blueprint.dims, ep=blueprint.dims.ep * blueprint.dims.etp, etp=1)) in suggestions:
            continue
        on_event(0, "best", len(suggestions), count)
        suggestion = _suggestion(blueprint, num_gpus, batch, bandwidth)
        if suggestion.memory.total > gpu_bytes:
            too_large.append(TooLarge(blueprint.dims, suggestion.memory.total))
        else:
            suggestions[twins] = suggestion
    too_large.sort(key=lambda mesh: mesh.bytes)
    enough: Iterable[Enough] = ()
    if not suggestions:
        enough = _enough(model, num_gpus, lambda gpus: meshes(gpus, config, given, gpus_per_node), batch, gpu_bytes)
    return Search(
        gpus=num_gpus,
        gpus_per_node=gpus_per_node,
        gpu_bytes=int(gpu_bytes),
        batch=batch,
        suggestions=tuple(suggestions.values()),
        too_large=tuple(too_large),
        refused=refused,
        enough=tuple(enough),
        has_experts=bool(config.num_moe_experts),
    )


def _model_of(folder: Path, options: BuildOptions, dtype: torch.dtype | None) -> _SearchedModel:
    provenance = provenance_of(folder, head=None)
    single = blueprint_of(provenance, replace(options, dims=ParallelDims()), dtype=dtype)
    provenance = provenance.seeing(options.vision, single.provenance.tower)  # every mesh has the same tower

    @functools.cache
    def made(dims: ParallelDims) -> Blueprint:
        return blueprint_of(provenance, replace(options, dims=dims), dtype=dtype)

    return _SearchedModel(made, single, single.counts)


def _suggestion(blueprint: Blueprint, num_gpus: int, batch: Batch, bandwidth: float) -> Suggestion:
    ranks, _ = build_stages(blueprint)
    memory = training_memory(blueprint, rank_sizes(blueprint, ranks), world_size=num_gpus, batch=batch)
    dims, num_bytes = blueprint.dims, blueprint.counts.total * blueprint.dtype.itemsize
    num_senders = stage_size(dims, num_gpus) * dims.pp
    seconds = num_bytes * (1 - 1 / num_senders) / bandwidth / 1e9
    return Suggestion(dims, dims.dp(num_gpus), dims.edp(num_gpus), memory, seconds)


def _enough(
    model: _SearchedModel,
    num_gpus: int,
    meshes_for: Callable[[int], Sequence[ParallelDims]],
    batch: Batch,
    gpu_bytes: float,
) -> Iterator[Enough]:
    """Yield the least doubling of GPUs for which a mesh fits, and the least with recomputation if it is smaller."""
    sizes = [num_gpus << doublings for doublings in range(MOST_DOUBLINGS + 1)]
    for recompute in sorted({batch.recompute, True}):
        own = replace(batch, recompute=recompute)
        for gpus in sizes:
            if (gpus, recompute) == (num_gpus, batch.recompute):
                continue  # the search has found nothing here
            most_cut_first = sorted(meshes_for(gpus), key=lambda dims: -dims.model_size * dims.ep * dims.etp)
            if any(model.fits(dims, gpus, own, gpu_bytes) for dims in most_cut_first):
                yield Enough(gpus, recompute)
                sizes = [size for size in sizes if size < gpus]
                break


def _candidates(
    make: Callable[[ParallelDims], Blueprint], searched: Sequence[ParallelDims], on_event: OnEvent
) -> tuple[list[Blueprint], tuple[Refused, ...]]:
    """Blueprints of the meshes that ``build_model`` accepts; and the reasons why it refuses others."""
    accepted: list[Blueprint] = []
    refused: dict[str, list[ParallelDims]] = {}
    for number, dims in enumerate(searched):
        try:
            accepted.append(make(dims))
        except BridgeError as error:
            refused.setdefault(str(error), []).append(dims)
        on_event(0, "meshes", number + 1, len(searched))
    return accepted, tuple(Refused(reason, tuple(meshes)) for reason, meshes in refused.items())
