"""The inventories that ``plan`` derives equal the inventories of real models of all ranks, for every mix of axes."""

import math
from collections import Counter

import pytest
import torch
import torch.distributed as dist

from mcore_bridge import ParallelDims, build_model
from mcore_bridge.commands.plan.mesh_plan import plan_mesh
from mcore_bridge.commands.plan.replicas import replicas
from mcore_bridge.commands.plan.tables import plan
from mcore_bridge.factory.blueprint import BuildOptions, make_blueprint
from mcore_bridge.weights.bound import bind
from mcore_bridge.weights.transfer.collectives import Group
from tests.support import fake_mesh
from tests.support.strategies import tiny

HF = tiny(
    "qwen3_moe",
    num_hidden_layers=2,
    num_experts=12,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    mlp_only_layers=[0],
    vocab_size=64,
)
MESHES = [
    ParallelDims(tp=2, pp=2, sp=True),
    ParallelDims(ep=4, pp=2),
    ParallelDims(tp=4, ep=2, sp=True),
    ParallelDims(tp=2, ep=2, etp=2, pp=2, sp=True),
    ParallelDims(tp=2, ep=4, sp=True),
    ParallelDims(etp=2, pp=2),
    ParallelDims(tp=2, cp=2, ep=2, pp=2, sp=True),
    ParallelDims(cp=2, ep=3, etp=2),
    ParallelDims(tp=4, ep=3, etp=2, sp=True),
    ParallelDims(tp=2, ep=3, pp=2, sp=True),
]


def real(dims, world_size):
    """The inventory of every rank of the group of rank 0, and the groups of all ranks."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups, inventories = {}, {}
    for rank in range(world_size):
        with fake_mesh.rank_of(dims, rank, world_size):
            group = Group.of_replica(ProcessGroupCollection.use_mpu_process_groups())
            groups[rank] = tuple(dist.get_process_group_ranks(group.group))
            if rank in groups[0]:
                models = build_model(HF, dims=dims, load_weights=False, device="meta", dtype=torch.bfloat16)
                inventories[rank] = bind(models).inventory()
    return [inventories[rank] for rank in groups[0]], groups


@pytest.mark.parametrize("world_of", [1, 2], ids=["smallest", "twice"])
@pytest.mark.parametrize("dims", MESHES, ids=str)
def test_derived_inventories_are_the_real_ones(dims, world_of):
    world_size = world_of * dims.smallest_world
    found, groups = real(dims, world_size)
    firsts = [found[i * len(found) // dims.pp] for i in range(dims.pp)]
    assert replicas(firsts, dims, num_experts=12, world_size=world_size) == found
    for rank, group in groups.items():  # otherwise some ranks would wait forever
        assert rank in group
        assert all(groups[other] == group for other in group)


def test_where_neither_kind_of_axes_lies_in_the_other_all_ranks_export_together():
    dims = ParallelDims(tp=2, ep=3, sp=True)
    assert fake_mesh.replica(dims) == list(range(6))
    held = fake_mesh.build_everywhere(HF, dims, lambda chunks: None, dtype=torch.float32)
    plan = fake_mesh.plan_of(held, bucket_bytes=1 << 16)
    loads = Counter()
    for message in plan.messages:
        for piece in message.pieces:
            loads[piece.sender] += piece.count * plan.payload.entries[piece.entry].row_bytes
    assert set(loads) == set(range(6))
    assert max(loads.values()) < 1.2 * min(loads.values())  # each holder of a tensor sends a part of it


@pytest.mark.parametrize("dims", MESHES[3:], ids=str)
def test_plans_are_those_of_the_real_models(dims, tmp_path):
    HF.save_pretrained(tmp_path)
    held = fake_mesh.build_everywhere(HF, dims, lambda chunks: None, dtype=torch.bfloat16)
    found = plan(tmp_path, BuildOptions(dims=dims), dtype=torch.bfloat16)
    assert found.export == fake_mesh.plan_of(held, bucket_bytes=None)


def test_a_balanced_pipeline_counts_experts_as_ranks_hold_them():
    """The first layer is dense, and has more bytes on a rank than a layer of experts, which ranks share."""
    hf = tiny(
        "qwen3_moe",
        num_hidden_layers=8,
        num_experts=32,
        moe_intermediate_size=80,
        intermediate_size=80 * 8,
        mlp_only_layers=[0, 1],
        vocab_size=64,
    )
    for ep, bound in ((1, 1.3), (8, 1.3), (32, 1.3)):
        blueprint = make_blueprint(
            hf, BuildOptions(dims=ParallelDims(pp=3, ep=ep, layout="balanced"), dtype=torch.bfloat16, device="meta")
        )
        planned = plan_mesh(blueprint, world_size=math.lcm(3, 3 * ep))
        totals = [sum(chunk.num_bytes for chunk in chunks) for chunks in planned.ranks]
        assert max(totals) <= bound * sum(totals) / 3, (ep, totals)
