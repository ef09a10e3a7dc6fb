"""What is computed in FP8 while parameters are in bf16: log-probs and gradients in every recipe, on real GPUs.

Forward FP8 keeps 3 bits behind the point where bf16 keeps 7, and backward 2: so log-probs may be 2**4 times as far from
fp32 as in bf16, and gradients 2**5 times. An export gives back what was loaded, before and after.
"""

import importlib.util
import traceback

import pytest
import torch

import mcore_bridge as mb
from tests import records
from tests.gpus import spawn
from tests.stepping import gradients_in_order
from tests.strategies import random_state, tiny
from tests.test_forward import batch_of
from tests.test_gpu import DENSE, LATENT, SIZES, SPARSE
from tests.test_gpu_context import ROUNDING, distances

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(not importlib.util.find_spec("transformer_engine"), reason="needs TransformerEngine"),
]

FAMILIES = {
    "qwen3": DENSE["qwen3"],
    "qwen3_moe": SPARSE["qwen3_moe"],
    "deepseek_v3": tiny("deepseek_v3", **{**SIZES, **LATENT, "q_lora_rank": 128, "kv_lora_rank": 128}),
}
"""Blockwise TransformerEngine gathers rows of multiples of 128 alone."""
RECIPES = {"delayed": 16, "tensorwise": 16, "blockwise": 128}
"""And what the tokens of a rank must be a multiple of."""
MESHES = {1: [mb.ParallelDims()], 2: [mb.ParallelDims(tp=2, sp=True), mb.ParallelDims(ep=2)]}
ALLOWED = 2**4, 2**5
"""Of log-probs, and of gradients: how much further from fp32 than bf16 is."""


def learn(hf, dims, state, multiple_of=1, **how):
    """Log-probs of a batch and the gradients of their sum; what an export gives then is what was loaded."""
    models = mb.build_model(hf, dims=dims, load_weights=state, **how)
    ids, mask = (tensor.cuda() for tensor in batch_of(hf))
    outputs = mb.forward(models, ids, mask, multiple_of=multiple_of, loss=lambda outputs, rows: outputs.log_probs.sum())
    exported = mb.to_hf_state_dict(models, device="cpu")
    assert all(torch.equal(exported[name], tensor.to(exported[name].dtype)) for name, tensor in state.items())
    return outputs.log_probs.detach(), gradients_in_order(models)


def examine(hf, dims, state):
    """By recipe: how much further from fp32 than bf16, log-probs and gradients."""
    exact = learn(hf, dims, state, dtype=torch.float32, backend="torch")
    rounded = distances(learn(hf, dims, state, backend="te"), exact)
    assert max(rounded) < ROUNDING
    found = {}
    for recipe, multiple_of in RECIPES.items():
        overrides = {"fp8": "hybrid", "fp8_recipe": recipe}
        there = learn(hf, dims, state, multiple_of, backend="te", overrides=overrides)
        found[recipe] = [own / usual for own, usual in zip(distances(there, exact), rounded, strict=True)]
    return found


def rank_main(rank, world_size):
    """Every family in every recipe on every mesh of this size."""
    from megatron.core import parallel_state

    findings = {}
    for dims in MESHES[world_size]:
        dims.initialize(device="cuda")
        for family, hf in FAMILIES.items():
            if dims.ep > 1 and family not in SPARSE:
                continue
            try:
                findings[str(dims), family] = examine(hf, dims, random_state(hf, dtype=torch.bfloat16))
            except Exception:
                findings[str(dims), family] = traceback.format_exc()
            if rank == 0:
                print(dims, family, findings[str(dims), family], flush=True)
        parallel_state.destroy_model_parallel()
    return findings


def is_right(found):
    """FP8 is what was computed in, and no more is off than its bits explain."""
    return isinstance(found, dict) and all(
        1.5 < own < most for ratios in found.values() for own, most in zip(ratios, ALLOWED, strict=True)
    )


@pytest.mark.parametrize("world_size", MESHES)
def test_fp8_is_as_near_as_its_bits_allow(world_size, tmp_path, request):
    found = [item for findings in spawn(rank_main, tmp_path, world_size) for item in findings.items()]
    passed = [(key, is_right(each)) for key, each in found]
    records.append(request.config.getoption("--record"), "fp8", world_size, passed)
    assert all(right for _, right in passed), found
