"""Plans do not change by accident: senders, messages and memory are recorded here.

Most changes to a planner leave exports right, and only make them slower or larger. So a change to a plan must be made
on purpose: ``python -m tests.weights.test_plans`` prints the new lines of PLANS.
"""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from mcore_bridge import EngineRank, ParallelDims, engine_ranks
from mcore_bridge.commands.plan.mesh_plan import plan_mesh
from mcore_bridge.errors import MappingError
from mcore_bridge.factory.blueprint import BuildOptions, make_blueprint
from mcore_bridge.rules.mapping import WeightMapping
from mcore_bridge.weights.plan.all_to_all import plan_targets
from mcore_bridge.weights.plan.export_plan import peak_bytes
from mcore_bridge.weights.plan.gather import plan_export
from mcore_bridge.weights.transfer.program import Program
from tests.support.strategies import tiny

HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8}
EXPERTS = {"num_experts": 96, "num_experts_per_tok": 2, "moe_intermediate_size": 1536, "mlp_only_layers": []}
SMALLER = {**EXPERTS, "moe_intermediate_size": 960}
MODELS = {
    "8B": tiny("qwen3", vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, **HEADS),
    "32B": tiny("llama", vocab_size=151936, hidden_size=5120, intermediate_size=25600, num_hidden_layers=16, **HEADS),
    "70B": tiny("llama", vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=16, **HEADS),
    "experts of 13 MB": tiny(
        "qwen3_moe", hidden_size=7168, head_dim=128, vocab_size=32000, num_hidden_layers=2, **SMALLER, **HEADS
    ),
    "small tied": tiny("qwen2", vocab_size=65, num_hidden_layers=6, tie_word_embeddings=True),
    "experts": tiny(
        "qwen3_moe", hidden_size=7168, head_dim=128, vocab_size=32000, num_hidden_layers=4, **EXPERTS, **HEADS
    ),
    "small stacked": tiny(
        "gpt_oss", num_hidden_layers=3, num_local_experts=8, num_experts_per_tok=2, num_key_value_heads=2
    ),
}
for rows in (115328, 112448, 102848, 94528, 77248, 64448, 51648):  # each allows messages of other sizes
    MODELS[f"wide {rows}"] = tiny(
        "llama", vocab_size=rows, hidden_size=8192, intermediate_size=8192, num_hidden_layers=8, **HEADS
    )
MESHES = {
    "PP4": ParallelDims(pp=4),
    "TP4": ParallelDims(tp=4, sp=True),
    "TP2 PP2": ParallelDims(tp=2, pp=2, sp=True),
    "TP2 PP2 VP2": ParallelDims(tp=2, pp=2, vp=2, sp=True),
    "TP2 PP16": ParallelDims(tp=2, pp=16, sp=True),
    "EP96": ParallelDims(ep=96),
    "PP2 EP96": ParallelDims(pp=2, ep=96),
    "TP2 PP2 EP4": ParallelDims(tp=2, pp=2, ep=4, sp=True),
    "TP2 EP4": ParallelDims(tp=2, ep=4, sp=True),
    "TP2 EP2 ETP2": ParallelDims(tp=2, ep=2, etp=2, sp=True),
}
ENGINES = {
    "TP1": engine_ranks(),
    "TP2": engine_ranks(tp=2),
    "TP4": engine_ranks(tp=4),
    "TP8": engine_ranks(tp=8),
    "TP8 EP8": engine_ranks(tp=8, ep=8),
    "PP2": engine_ranks(pp=2),
    "EP3": tuple(EngineRank(ep=3, ep_rank=rank) for rank in range(3)),
}
Case = tuple[str, str, str, float | None]
PLANS: dict[Case, tuple[int, int, int, int]] = {
    ("8B", "PP4", "", None): (58, 1978720640, 805, 879379328),
    ("8B", "TP4", "", 64): (418, 1428176992, 4436, 1378091735),
    ("8B", "PP4", "", 512): (53, 2247156096, 821, 3780942383),
    ("32B", "TP4", "", None): (83, 1971843072, 1159, 4117624605),
    ("32B", "TP2 PP2", "", None): (84, 1971843072, 766, 3540955959),
    ("32B", "TP2 PP2 VP2", "", 128): (242, 1971863552, 1631, 763867667),
    ("70B", "TP2 PP2", "", None): (69, 3015774208, 681, 553682215),
    ("70B", "TP2 PP16", "", 256): (208, 2871033856, 1451, 2905903987),
    ("experts", "EP96", "", None): (114, 1976988160, 6322, 3764750874),
    ("experts of 13 MB", "EP96", "", None): (38, 1925251072, 3356, 3203746511),
    ("experts", "PP2 EP96", "", None): (154, 1842999808, 8190, 3301788537),
    ("experts", "TP2 PP2 EP4", "", 128): (402, 703092736, 4394, 1511707708),
    ("experts", "TP2 EP2 ETP2", "", 32): (1605, 558381056, 14075, 28181413),
    ("small stacked", "TP2 EP4", "", 0.03125): (57, 225792, 545, 1159852896),
    ("small tied", "TP2 PP2", "", 0.03125): (35, 116160, 379, 2818152165),
    ("8B", "PP4", "TP1", None): (212, 1522075744, 2385, 1843383104),
    ("8B", "TP4", "TP2", None): (53, 1004020320, 1892, 2557915210),
    ("70B", "TP2 PP2", "TP1", None): (546, 2703292928, 5264, 2657097335),
    ("32B", "TP2 PP2 VP2", "TP8", 128): (75, 384656384, 1085, 915079517),
    ("experts", "EP96", "TP8 EP8", None): (14, 1335761920, 1972, 3276323377),
    ("experts", "TP2 PP2 EP4", "EP3", None): (64, 1181470720, 1848, 3601031767),
    ("experts", "TP2 EP2 ETP2", "TP8", None): (18, 639201280, 2596, 1132251669),
    ("small stacked", "TP2 EP4", "TP2", 0.125): (10, 244056, 397, 3166340808),
    ("small tied", "TP2 PP2", "PP2", 0.03125): (31, 96096, 384, 2727175994),
    ("wide 115328", "TP4", "", None): (124, 1984847872, 1166, 2971448501),
    ("wide 112448", "TP4", "", None): (84, 1968070656, 894, 1367384558),
    ("wide 112448", "PP4", "", None): (104, 1993400320, 597, 3981205667),
    ("wide 102848", "PP4", "", None): (82, 1946034176, 525, 1470003210),
    ("wide 102848", "TP4", "", None): (43, 1942003712, 603, 914955756),
    ("wide 94528", "TP4", "", None): (33, 1982865408, 521, 414138986),
    ("wide 77248", "TP4", "", None): (18, 1968185344, 416, 1028586733),
    ("wide 64448", "PP4", "", None): (44, 1987174400, 335, 2551812498),
    ("wide 51648", "TP4", "", None): (14, 1942028288, 388, 3875115486),
    ("small tied", "TP2 PP2", "", 0.25): (4, 550048, 193, 1974805099),
    ("small tied", "TP2 PP2", "", None): (1, 981824, 159, 3257041419),
    ("small tied", "TP4", "TP4", 0.0625): (5, 65024, 152, 2773123557),
    ("small tied", "TP4", "TP1", 0.0625): (27, 116672, 719, 199229607),
}
"""For each model, mesh, engine and size of buckets in MB: messages, bytes of memory, copies of a rank, a checksum."""


@functools.cache
def replica(model: str, mesh: str) -> Any:
    blueprint = make_blueprint(MODELS[model], BuildOptions(dims=MESHES[mesh], dtype=torch.bfloat16, device="meta"))
    return plan_mesh(blueprint, world_size=MESHES[mesh].smallest_world).replica


def planned(model: str, mesh: str, engine: str, megabytes: float | None) -> tuple[int, int, int, int]:
    """The record of a case in PLANS: of the first, the middle and the last rank, if they get different tensors."""
    held, bucket_bytes = replica(model, mesh), int(megabytes * (1 << 20)) if megabytes else None
    num_ranks = len(held.inventories)
    ranks = sorted({0, num_ranks // 2, num_ranks - 1})
    if engine:
        targets = [ENGINES[engine][rank % len(ENGINES[engine])] for rank in range(num_ranks)]
        receivers = plan_targets(*held, targets, bucket_bytes=bucket_bytes)
        plans = [receivers.plans_of(rank) for rank in ranks]
    else:
        plans = [[plan_export(*held, bucket_bytes=bucket_bytes)]] * len(ranks)
    programs = [Program(plan, rank) for plan, rank in zip(plans, ranks, strict=True)]
    own = [program.plan for program in programs]
    numbers = range(len(own[0].messages))
    tables = [table for n in numbers for table in (programs[0].step(n, n).copies, programs[0].headers(n))]
    copies = sum(len(table.table) for table in tables)
    number = hash(tuple(plan.checksum() for plan in own)) % (1 << 32)
    return len(numbers), max(map(peak_bytes, own)), copies, number


@pytest.mark.parametrize("kind", sorted({model.split()[0] for model in MODELS}))
def test_plans_are_what_they_were(kind: str) -> None:
    kept = {case: found for case, found in PLANS.items() if case[0].startswith(kind)}
    assert {case: planned(*case) for case in kept} == kept


def test_ranks_that_describe_a_parameter_otherwise_are_refused() -> None:
    held = replica("small tied", "TP4")
    first, *others = held.inventories[1].held
    inventories = [*held.inventories]
    inventories[1] = replace(inventories[1], held=(replace(first, dtype=torch.float32), *others))
    with pytest.raises(MappingError, match=r"rank 1 of the group holds .*float32.* another .*bfloat16"):
        plan_export(held.mapping, held.axes, held.num_layers, inventories, bucket_bytes=None)


def test_groups_without_all_of_a_model_are_refused() -> None:
    """Without the last rank, its shards, its layers or its experts are missing."""
    for model, mesh, message in (
        ("small tied", "TP4", r"no rank of the group holds the shards \[3\] of .*; is a rank missing in it"),
        ("small tied", "TP2 PP2", r"no rank of the group holds the shards \[1\] of .*; is a rank missing in it"),
        ("small stacked", "TP2 EP4", r"no rank of the group holds the experts \[6, 7\] of .*is a rank missing in it"),
    ):
        held = replica(model, mesh)
        with pytest.raises(MappingError, match=message):
            plan_export(held.mapping, held.axes, held.num_layers, held.inventories[:-1], bucket_bytes=None)
    held = replica("small tied", "TP4")
    with pytest.raises(MappingError, match=r"hold the layers \[0, 1, 2, 3, 4, 5\], expected 0 to 6"):
        plan_export(held.mapping, held.axes, held.num_layers + 1, held.inventories, bucket_bytes=None)


def test_two_parameters_for_one_tensor_are_refused() -> None:
    held, norm, name = replica("small tied", "TP4"), "decoder.final_layernorm.weight", "model.embed_tokens.weight"
    rules = tuple(replace(rule, hf=(name,)) if rule.mcore == norm else rule for rule in held.mapping.rules)
    with pytest.raises(MappingError, match=f"{name} has two sources, .* and .*; fix the rules"):
        plan_export(WeightMapping(rules), held.axes, held.num_layers, held.inventories, bucket_bytes=None)


if __name__ == "__main__":
    for each in PLANS:
        print(f"    {each}: {planned(*each)},".replace("'", '"'))
