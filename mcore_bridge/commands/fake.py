"""What each rank of a mesh would hold, from the ``GPTModel`` that megatron-core really builds there.

The model is on the meta device and the processes are torch's `fake` backend: nothing is started and no storage is
taken, whatever the size. Ranks of one pipeline stage hold equal shapes, so that the first of each stage stands for all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from mcore_bridge.commands.options import smallest_world
from mcore_bridge.commands.replicas import replicas
from mcore_bridge.config.parallel import ParallelDims
from mcore_bridge.config.pipeline import Stage
from mcore_bridge.config.processes import group_sizes
from mcore_bridge.weights.bound import BoundModel, bind
from mcore_bridge.weights.entries import Held, Inventory
from mcore_bridge.weights.names import expert_of, layer_of, mtp_layer_of, renumber_layer
from mcore_bridge.weights.plan import ExportPlan
from mcore_bridge.weights.planning import plan_export

if TYPE_CHECKING:
    from mcore_bridge.factory.blueprint import Blueprint


@dataclass(frozen=True, slots=True)
class Cell:
    """A layer of a chunk ("7"), an MTP layer ("mtp 0"), or what stands before the first or behind the last one."""

    name: str
    held: tuple[Held, ...]

    @property
    def num_parameters(self) -> int:
        """Elements that a rank holds."""
        return sum(torch.Size(held.shape).numel() for held in self.held)

    @property
    def num_bytes(self) -> int:
        """Bytes that a rank holds."""
        return sum(held.num_bytes for held in self.held)


@dataclass(frozen=True, slots=True)
class Chunk:
    """One pipeline stage, as one of its ranks holds it."""

    stage: Stage
    cells: tuple[Cell, ...]

    @property
    def num_parameters(self) -> int:
        """Elements that a rank holds."""
        return sum(cell.num_parameters for cell in self.cells)

    @property
    def num_bytes(self) -> int:
        """Bytes that a rank holds."""
        return sum(cell.num_bytes for cell in self.cells)

    @property
    def held(self) -> tuple[Held, ...]:
        """All tensors that a rank holds."""
        return tuple(held for cell in self.cells for held in cell.held)

    @property
    def num_expert_bytes(self) -> int:
        """Bytes of routed experts that a rank holds."""
        return sum(held.num_bytes for held in self.held if expert_of(held.mcore) is not None)

    @property
    def num_mtp_layers(self) -> int:
        """MTP layers that a rank holds."""
        return len({cell.name for cell in self.cells if cell.name.startswith("mtp ")})


@dataclass(frozen=True, slots=True)
class MeshPlan:
    """What all ranks hold: chunks by pipeline rank and virtual stage; and how an export would travel."""

    blueprint: Blueprint
    world_size: int
    ranks: tuple[tuple[Chunk, ...], ...]
    export: ExportPlan


def plan_mesh(blueprint: Blueprint, *, world_size: int) -> MeshPlan:
    """Build pipeline stages without storage, one after the other, and once where they are of the same kinds of layers.

    Args:
        blueprint: on the meta device.
        world_size: of the whole job, for data parallelism. Groups are made for the smallest world that the mesh fits.

    Raises:
        BridgeError: the mesh, the model or the world size do not fit each other.
    """
    dims = blueprint.dims
    dims.dp(world_size)
    dims.edp(world_size)
    smallest = smallest_world(dims)
    ranks, inventories = [], []
    built: list[_Built] = []
    for pp_rank in range(dims.pp):
        stages = [stage for stage in blueprint.stages if stage.pp_rank == pp_rank]
        kinds = _kinds(blueprint, stages)
        like = next((each for each in built if each.kinds == kinds), None)
        if like is None:
            rank = pp_rank * (smallest // dims.pp)  # the pipeline is mcore's outermost axis
            with rank_of(dims, rank, smallest), _one_thread():
                like = _build(blueprint, stages, kinds)
            built.append(like)
        ranks.append(like.chunks(stages))
        inventories.append(like.inventory(stages))
    bound = built[0].bound
    group = replicas(inventories, dims, num_experts=bound.axes["experts"], world_size=world_size)
    export = plan_export(bound.mapping, bound.axes, blueprint.config.num_layers, group, bucket_bytes=None)
    return MeshPlan(blueprint, world_size, tuple(ranks), export)


@contextlib.contextmanager
def _own_groups_only(rank: int) -> Iterator[None]:
    """megatron-core makes the groups of all ranks on each; here a rank is alone, and they would take it seconds."""
    import torch.distributed as dist

    made = dist.new_group

    def new_group(ranks: Sequence[int] | None = None, **options: Any) -> object:
        if ranks is None or rank in ranks:
            return made(ranks, **options)
        return dist.GroupMember.NON_GROUP_MEMBER

    dist.new_group = new_group  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.new_group = made


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Latent attention computes a small table in each layer that is built; several threads would mostly wait for it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def rank_of(dims: ParallelDims, rank: int, world_size: int) -> Iterator[None]:
    """Be one rank of a mesh."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from mcore_bridge.cpu import enable_cpu

    enable_cpu()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with _own_groups_only(rank):
            parallel_state.initialize_model_parallel(**group_sizes(dims), create_gloo_process_groups=False)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@dataclass(frozen=True, slots=True)
class _Built:
    """What was built for the ``stages`` of one pipeline rank: the same as of every other whose ``kinds`` are equal."""

    kinds: object
    stages: Sequence[Stage]
    bound: BoundModel
    whole: Inventory
    parts: tuple[Inventory, ...]
    """Of each chunk."""

    def inventory(self, stages: Sequence[Stage]) -> Inventory:
        """What the rank of ``stages`` holds."""
        ranks = {**self.whole.ranks, "pp": stages[0].pp_rank}
        return Inventory(ranks, self._numbered(self.whole.held, stages))

    def chunks(self, stages: Sequence[Stage]) -> tuple[Chunk, ...]:
        """The same by chunk."""
        pairs = zip(stages, self.parts, strict=True)
        return tuple(Chunk(stage, _cells(self._numbered(part.held, stages))) for stage, part in pairs)

    def _numbered(self, held: tuple[Held, ...], stages: Sequence[Stage]) -> tuple[Held, ...]:
        """With the numbers of the layers of ``stages`` for those that were built."""
        if stages[0].pp_rank == self.stages[0].pp_rank:
            return held
        theirs, ours = (chain.from_iterable(stage.layers for stage in each) for each in (self.stages, stages))
        numbers = dict(zip(theirs, ours, strict=True))
        return tuple(Held(renumber_layer(each.mcore, numbers), each.shape, each.dtype) for each in held)


def _kinds(blueprint: Blueprint, stages: Sequence[Stage]) -> str:
    """What megatron-core builds stages from, but for the numbers of their layers. MTP layers are of one stage.

    As text, in which the partials of specs are equal where they hold the same; what has no text but its address is not.
    """
    kinds = [
        (
            stage.embedding,
            stage.loss,
            stage.num_mtp_layers,
            blueprint.block_spec(stage),
            blueprint.mtp_block_spec(stage),
        )
        for stage in stages
    ]
    return repr(kinds)


def _build(blueprint: Blueprint, stages: Sequence[Stage], kinds: object) -> _Built:
    from mcore_bridge.factory.build import build_model

    models = build_model(
        blueprint.hf,
        dims=blueprint.dims,
        dtype=blueprint.dtype,
        device=blueprint.device,
        backend=blueprint.backend,
        overrides={"mtp_num_layers": blueprint.config.mtp_num_layers},
        load_weights=False,
    )
    bound = bind(models)
    return _Built(kinds, stages, bound, bound.inventory(), tuple(bind(model).inventory() for model in models))


def _cells(tensors: tuple[Held, ...]) -> tuple[Cell, ...]:
    """Held tensors by layer, in order, the output last. Buffers, such as a router's bias, are held behind all else."""
    cells: dict[str, list[Held]] = {}
    for held in tensors:
        cells.setdefault(_cell_name(held), []).append(held)
    return tuple(Cell(name, tuple(cells[name])) for name in sorted(cells, key=lambda name: name == "output"))


def _cell_name(held: Held) -> str:
    layer = layer_of(held.mcore)
    if layer is not None:
        return str(layer)
    if (number := mtp_layer_of(held.mcore)) is not None:
        return f"mtp {number}"
    return "embedding" if held.mcore.startswith("embedding.") else "output"
