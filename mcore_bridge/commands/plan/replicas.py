"""The inventories of all ranks of one replica, from the inventories of the first rank of each pipeline stage.

The ranks of a stage hold tensors with equal shapes and names, except for the numbers of routed experts. megatron-core
splits the ranks of a stage in two ways: into tensor, context and data parallelism; and for experts into tensor, expert
and data parallelism. In both, the first axis varies fastest, and the pipeline is the outermost axis.
"""

from __future__ import annotations

from collections.abc import Sequence

from mcore_bridge.config.mesh.parallel_dims import ParallelDims
from mcore_bridge.rules.names import expert_of, shift_expert
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.plan.inventory import Inventory


def replicas(firsts: Sequence[Inventory], dims: ParallelDims, *, num_experts: int, world_size: int) -> list[Inventory]:
    """The inventories of all ranks of the first model replica, in the order of the group that exports it.

    Args:
        firsts: the inventories of the first rank of each pipeline stage.
        num_experts: the number of experts in a layer of the whole model.
        world_size: the number of ranks in the job.
    """
    ranks = range(stage_size(dims, world_size))
    return [inventory for first in firsts for inventory in _stage(first, dims, ranks, num_experts // dims.ep)]


def members(dims: ParallelDims, world_size: int) -> list[int]:
    """The ranks of the job that form the first replica, in the same order as ``replicas``."""
    own = stage_size(dims, world_size)
    return [first + rank for first in range(0, world_size, world_size // dims.pp) for rank in range(own)]


def stage_size(dims: ParallelDims, world_size: int) -> int:
    """The number of ranks of one pipeline stage that export together: see ``Group.of_replica``."""
    small, large = sorted((dims.tp, dims.etp * dims.ep))
    return world_size // dims.pp if large % small else large


def _stage(first: Inventory, dims: ParallelDims, ranks: range, num_local: int) -> list[Inventory]:
    held = [first.held]  # by expert-parallel rank: equal for all ranks that hold the rank's experts
    for ep_rank in range(1, dims.ep):
        shift = ep_rank * num_local
        held.append(tuple(_shifted(tensor, shift) for tensor in first.held))
    return [
        Inventory({**first.ranks, "tp": rank % dims.tp, "etp": rank % dims.etp}, held[rank // dims.etp % dims.ep])
        for rank in ranks
    ]


def _shifted(held: TensorSpec, shift: int) -> TensorSpec:
    """The tensor of another expert, ``shift`` numbers further. Other tensors stay as they are."""
    if expert_of(held.name) is None:
        return held
    return TensorSpec.of(shift_expert(held.name, shift), held)
