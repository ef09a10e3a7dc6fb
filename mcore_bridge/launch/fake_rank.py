"""Runs this process as any rank of a mesh, with torch's `fake` process group: nothing is started or sent."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from mcore_bridge.config.mesh.parallel_dims import ParallelDims


@contextlib.contextmanager
def rank_of(dims: ParallelDims, rank: int, world_size: int) -> Iterator[None]:
    """Run the block as ``rank`` of a mesh, with torch's fake process group."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from mcore_bridge.cpu import enable_cpu

    enable_cpu()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with _own_groups_only(rank):
            parallel_state.initialize_model_parallel(**dims.to_group_sizes(), create_gloo_process_groups=False)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@contextlib.contextmanager
def _own_groups_only(rank: int) -> Iterator[None]:
    """Create only groups with ``rank`` in them. megatron-core creates the groups of all ranks, which takes seconds."""
    import torch.distributed as dist

    original = dist.new_group

    def new_group(ranks: Sequence[int] | None = None, **options: Any) -> object:
        if ranks is None or rank in ranks:
            return original(ranks, **options)
        return dist.GroupMember.NON_GROUP_MEMBER

    dist.new_group = new_group  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.new_group = original
