"""Computes in FP8 with bf16 parameters: log-probs and gradients in every recipe, on real GPUs.

bf16 keeps 7 bits behind the point. FP8 keeps 3 bits in the forward and 2 in the backward. So log-probs may be 2**4
times as far from fp32 as in bf16, and gradients 2**5 times. Every expert gets every token, as in
``test_gpu_context.py``. An export after a backward has the bits that were loaded.
"""

import importlib.util
import traceback

import pytest
import torch

import mcore_bridge as mb
from tests.support import records
from tests.support.gpu_batches import has_experts
from tests.support.gpu_models import DENSE, EXPERTS, LATENT, SIZES
from tests.support.gpu_steps import distances, learn
from tests.support.gpus import spawn, with_replicas
from tests.support.strategies import random_state, tiny

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(not importlib.util.find_spec("transformer_engine"), reason="needs TransformerEngine"),
]

ALL = {"num_experts_per_tok": LATENT["n_routed_experts"]}
FAMILIES = {
    "qwen3": DENSE["qwen3"],
    "qwen3_moe": tiny(
        "qwen3_moe", **{**SIZES, **EXPERTS, "num_experts_per_tok": 8}, num_experts=8, mlp_only_layers=[1]
    ),
    "deepseek_v3": tiny("deepseek_v3", **{**SIZES, **LATENT, **ALL, "q_lora_rank": 128, "kv_lora_rank": 128}),
}
"""In the blockwise recipe, TransformerEngine gathers only rows that are multiples of 128."""
RECIPES = ("delayed", "tensorwise", "blockwise")
MESHES = {1: [mb.ParallelDims()], 2: [mb.ParallelDims(tp=2, sp=True), mb.ParallelDims(ep=2)]}
ALLOWED = 2**4, 2**5
"""The bound of the error of log-probs and of gradients, as a multiple of the error in bf16."""


def examine(hf, dims, state):
    """For each recipe, the errors of log-probs and gradients, divided by the errors of bf16."""
    exact = learn(hf, dims, state, packed=True, dtype=torch.float32, backend="torch")
    rounded = distances(learn(hf, dims, state, packed=True, backend="te"), exact)
    print(dims, hf.model_type, "bf16:", rounded, flush=True)
    found = {}
    for recipe in RECIPES:
        overrides = {"fp8": "hybrid", "fp8_recipe": recipe}
        there = learn(hf, dims, state, packed=True, backend="te", overrides=overrides)
        found[recipe] = [own / usual for own, usual in zip(distances(there, exact), rounded, strict=True)]
    return found


def rank_main(rank, world_size):
    """Every family in every recipe on every mesh of this size."""
    from megatron.core import parallel_state

    findings = {}
    for dims in MESHES[world_size]:
        dims.initialize(device="cuda")
        for family, hf in FAMILIES.items():
            if dims.ep > 1 and not has_experts(hf):
                continue
            key = with_replicas(dims, world_size), family
            try:
                findings[key] = examine(hf, dims, random_state(hf, dtype=torch.bfloat16))
            except Exception:
                findings[key] = traceback.format_exc()
            if rank == 0:
                print(*key, findings[key], flush=True)
        parallel_state.destroy_model_parallel()
    return findings


def is_right(found):
    """Results show that FP8 was used, and errors are no larger than its bits explain."""
    return isinstance(found, dict) and all(
        1.5 < own < most for ratios in found.values() for own, most in zip(ratios, ALLOWED, strict=True)
    )


@pytest.mark.parametrize("world_size", MESHES)
def test_fp8_is_as_near_as_its_bits_allow(world_size, tmp_path, request):
    found = [item for findings in spawn(rank_main, tmp_path, world_size) for item in findings.items()]
    passed = [(key, is_right(each)) for key, each in found]
    records.append(request.config.getoption("--record"), "fp8", world_size, passed)
    assert all(right for _, right in passed), found
