"""Counts the tensors that each rank of a mesh holds, in the model that megatron-core builds for that rank.

The model is on the meta device, and the process group is torch's `fake` backend: no process is started, and no storage
is allocated. Ranks of one pipeline stage hold equal shapes, so only the first rank of each stage is built.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from mcore_bridge.commands.plan.replicas import replicas
from mcore_bridge.config.mesh.pipeline import Stage
from mcore_bridge.errors import CheckpointError, MappingError
from mcore_bridge.launch.fake_rank import rank_of
from mcore_bridge.rules.mapping import ModelAxes, WeightMapping
from mcore_bridge.rules.names import TOWER, count_mtp_layers, expert_of, layer_of, mtp_layer_of, renumber_layer
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.bound import BoundModel, bind
from mcore_bridge.weights.files.hf_folder import shard_names
from mcore_bridge.weights.plan.export_plan import ExportPlan
from mcore_bridge.weights.plan.gather import plan_export
from mcore_bridge.weights.plan.inventory import Inventory
from mcore_bridge.weights.source.weight_format import AS_PUBLISHED, PLAIN, weight_format

if TYPE_CHECKING:
    from mcore_bridge.factory.blueprint import Blueprint


@dataclass(frozen=True, slots=True)
class HeldTensors:
    """Some of the tensors of one rank, in order: parameters, then buffers."""

    held: tuple[TensorSpec, ...]

    @property
    def num_parameters(self) -> int:
        """Elements that a rank holds."""
        return sum(held.numel for held in self.held)

    @property
    def num_bytes(self) -> int:
        """Bytes that a rank holds."""
        return sum(held.num_bytes for held in self.held)

    @property
    def experts(self) -> HeldTensors:
        """The tensors of routed experts alone."""
        return HeldTensors(tuple(held for held in self.held if expert_of(held.name) is not None))


@dataclass(frozen=True, slots=True)
class Cell(HeldTensors):
    """A layer of a chunk ("7"), an MTP layer ("mtp 0"), or the modules before the first or after the last layer."""

    name: str


@dataclass(frozen=True, slots=True)
class Chunk(HeldTensors):
    """One pipeline stage, as one of its ranks holds it."""

    stage: Stage

    @property
    def cells(self) -> tuple[Cell, ...]:
        """The tensors by layer, in order, the output last."""
        cells: dict[str, list[TensorSpec]] = {}
        for held in self.held:
            cells.setdefault(_cell_name(held), []).append(held)
        return tuple(Cell(tuple(cells[name]), name) for name in sorted(cells, key=lambda name: name == "output"))

    @property
    def num_mtp_layers(self) -> int:
        """MTP layers that a rank holds."""
        return count_mtp_layers(held.name for held in self.held)

    @property
    def has_tower(self) -> bool:
        """Whether a rank holds the composite's models of images."""
        return any(held.name.startswith(TOWER) for held in self.held)


class Replica(NamedTuple):
    """The inputs of export plans, for the ranks that export together."""

    mapping: WeightMapping
    axes: ModelAxes
    num_layers: int
    inventories: Sequence[Inventory]


@dataclass(frozen=True, slots=True)
class MeshPlan:
    """The tensors of all ranks, as chunks by pipeline rank and virtual stage; and the plan of an export."""

    blueprint: Blueprint
    world_size: int
    ranks: tuple[tuple[Chunk, ...], ...]
    replica: Replica
    export: ExportPlan

    def as_published(self) -> ExportPlan | None:
        """The plan of an export in the format of the folder. Only headers of its files are read.

        None: the folder has no quantized weights, or is incomplete, or its codes cannot leave on this mesh.
        """
        folder = self.blueprint.provenance.folder
        try:
            form = weight_format(AS_PUBLISHED, folder) if folder and shard_names(Path(folder)) else PLAIN
            encode = partial(form.entries, self.replica.mapping)
            return plan_export(*self.replica, bucket_bytes=None, encode=encode) if form.is_encoded else None
        except (CheckpointError, MappingError):
            return None


def plan_mesh(blueprint: Blueprint, *, world_size: int) -> MeshPlan:
    """Builds pipeline stages without storage. Stages in the middle with only known kinds of layers are not built.

    Args:
        blueprint: a blueprint on the meta device.
        world_size: the ranks of the whole job, for data parallelism. Groups are made for the smallest world of the
            mesh.

    Raises:
        BridgeError: the mesh, the model or the world size do not fit each other.
    """
    dims = blueprint.dims
    dims.dp(world_size)
    dims.edp(world_size)
    ranks, bound = build_stages(blueprint)
    inventories = [
        Inventory({**bound.ranks, "pp": pp_rank}, tuple(held for chunk in chunks for held in chunk.held))
        for pp_rank, chunks in enumerate(ranks)
    ]
    group = replicas(inventories, dims, num_experts=bound.axes["experts"], world_size=world_size)
    replica = Replica(bound.mapping, bound.axes, blueprint.config.num_layers, group)
    return MeshPlan(blueprint, world_size, ranks, replica, plan_export(*replica, bucket_bytes=None))


def build_stages(blueprint: Blueprint) -> tuple[tuple[tuple[Chunk, ...], ...], BoundModel]:
    """The chunks by pipeline rank and virtual stage, and one of the chunks that megatron-core built for them."""
    layers, last = _Layers(blueprint), blueprint.dims.pp - 1
    order = (0, last, *range(1, last))[: last + 1]  # first the ends, which are always built
    chunks_by_rank = {pp_rank: _chunks(blueprint, pp_rank, layers) for pp_rank in order}
    return tuple(chunks_by_rank[pp_rank] for pp_rank in range(last + 1)), layers.bound


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Latent attention computes a small table for each layer. With several threads, these would mostly wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Layers:
    """Layers that were built, by kind: all layers of a kind hold tensors with equal shapes.

    A kind is the layer's spec as text, together with the layer's size. In the text, partials with equal contents are
    equal. The size is needed because a spec does not show whether a layer has an indexer.
    """

    bound: BoundModel
    """One of the chunks that were built."""

    def __init__(self, blueprint: Blueprint) -> None:
        self._blueprint = blueprint
        self._sizes = blueprint.counts.layers
        self._known: dict[object, tuple[list[TensorSpec], list[TensorSpec]]] = {}

    def learn(self, stage: Stage, bound: BoundModel) -> Chunk:
        """Record the layers of a stage that was built, and return its chunk."""
        self.bound, chunk = bound, Chunk(bound.inventory().held, stage)
        layers: dict[int, tuple[list[TensorSpec], list[TensorSpec]]] = {layer: ([], []) for layer in stage.layers}
        for held in chunk.held:
            if (layer := layer_of(held.name)) is not None:
                layers[layer][not isinstance(bound.tensors[held.name], nn.Parameter)].append(held)
        self._known |= zip(self._kinds(stage), layers.values(), strict=True)
        return chunk

    def chunk(self, stage: Stage) -> Chunk | None:
        """The chunk of a stage in the middle, if all its kinds of layers are known: parameters, and then buffers."""
        last = self._blueprint.config.num_layers - 1  # the final norm may be with it
        is_end = stage.embedding or stage.loss or stage.num_mtp_layers or last in stage.layers
        kinds = self._kinds(stage)
        if is_end or self._blueprint.architecture.model is not None or not self._known.keys() >= {*kinds}:
            return None
        layers = [(layer, self._known[kind]) for layer, kind in zip(stage.layers, kinds, strict=True)]
        held = (_of_layer(held, n) for sort in (0, 1) for n, pair in layers for held in pair[sort])
        return Chunk(tuple(held), stage)

    def _kinds(self, stage: Stage) -> list[object]:
        specs = self._blueprint.block_spec(stage.layers).layer_specs
        return [(repr(spec), self._sizes[layer]) for spec, layer in zip(specs, stage.layers, strict=True)]


def _of_layer(held: TensorSpec, layer: int) -> TensorSpec:
    return TensorSpec.of(renumber_layer(held.name, layer), held)


def _chunks(blueprint: Blueprint, pp_rank: int, layers: _Layers) -> tuple[Chunk, ...]:
    """The chunks of the first rank of a pipeline stage."""
    dims, smallest = blueprint.dims, blueprint.dims.smallest_world
    stages = [stage for stage in blueprint.stages if stage.pp_rank == pp_rank]
    known = tuple(chunk for stage in stages if (chunk := layers.chunk(stage)) is not None)
    if len(known) == len(stages):
        return known
    rank = pp_rank * (smallest // dims.pp)  # the pipeline is mcore's outermost axis
    with rank_of(dims, rank, smallest), _one_thread():
        return tuple(map(layers.learn, stages, _build(blueprint)))


def _build(blueprint: Blueprint) -> list[BoundModel]:
    """The chunks of this rank."""
    from mcore_bridge.factory.build import build_model

    overrides = {"mtp_num_layers": blueprint.config.mtp_num_layers}
    options = replace(blueprint.options, overrides=overrides, strict_config=False)
    models = build_model(blueprint.provenance.config, load_weights=False, **vars(options))
    return list(map(bind, models))


def _cell_name(held: TensorSpec) -> str:
    layer = layer_of(held.name)
    if layer is not None:
        return str(layer)
    if (number := mtp_layer_of(held.name)) is not None:
        return f"mtp {number}"
    if held.name.startswith(TOWER):
        return "tower"
    return "embedding" if held.name.startswith("embedding.") else "output"
