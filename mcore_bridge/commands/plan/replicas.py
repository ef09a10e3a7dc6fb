"""The inventories of all ranks that export together, from those of the first rank of each pipeline stage.

The ranks of a stage hold equal shapes under equal names, but for the numbers of their routed experts. megatron-core
deals the ranks of a stage out twice: to tensor, context and data parallelism, and, for experts, to tensor, expert and
data parallelism, always the first axis fastest. The pipeline is the outermost axis of either.
"""

from __future__ import annotations

from collections.abc import Sequence

from mcore_bridge.config.mesh.parallel_dims import ParallelDims
from mcore_bridge.rules.names import expert_of, shift_expert
from mcore_bridge.weights.plan.inventory import HeldTensor, Inventory


def replicas(firsts: Sequence[Inventory], dims: ParallelDims, *, num_experts: int, world_size: int) -> list[Inventory]:
    """What each rank of the first model replica holds, in the order of the group that exports it.

    Args:
        firsts: what the first rank of each pipeline stage holds.
        num_experts: of the whole model, in one layer.
        world_size: of the job: a group of all ranks has this size.
    """
    ranks = range(stage_size(dims, world_size))
    return [each for first in firsts for each in _stage(first, dims, ranks, num_experts // dims.ep)]


def members(dims: ParallelDims, world_size: int) -> list[int]:
    """The ranks of that replica in the job, in the same order."""
    own = stage_size(dims, world_size)
    return [first + rank for first in range(0, world_size, world_size // dims.pp) for rank in range(own)]


def stage_size(dims: ParallelDims, world_size: int) -> int:
    """How many ranks of one pipeline stage export together: see ``Group.of_replica``."""
    small, large = sorted((dims.tp, dims.etp * dims.ep))
    return world_size // dims.pp if large % small else large


def _stage(first: Inventory, dims: ParallelDims, ranks: range, num_local: int) -> list[Inventory]:
    held = [first.held]  # by expert-parallel rank, the same for all ranks that hold the same experts
    for ep_rank in range(1, dims.ep):
        shift = ep_rank * num_local
        held.append(tuple(_shifted(each, shift) for each in first.held))
    return [
        Inventory({**first.ranks, "tp": rank % dims.tp, "etp": rank % dims.etp}, held[rank // dims.etp % dims.ep])
        for rank in ranks
    ]


def _shifted(held: HeldTensor, shift: int) -> HeldTensor:
    """The tensor of an expert for that of another, and any other as it is."""
    if expert_of(held.mcore) is None:
        return held
    return HeldTensor(shift_expert(held.mcore, shift), held.shape, held.dtype)
