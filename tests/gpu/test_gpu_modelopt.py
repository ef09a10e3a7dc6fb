"""Trains a model that ModelOpt fake-quantizes in NVFP4 (QAT), on a real GPU, where its quantizers can run.

The weights that leave, decoded, are those with which the model computes. Its log-probs are much nearer to the saved
folder's than to the log-probs of plain weights.
"""

import importlib.util

import pytest
import torch

import mcore_bridge as mb
from mcore_bridge.trainers.weight_export import qat_format
from mcore_bridge.weights.model_tensors import local_names, quantizers_of
from tests.support.gpu_models import EXPERTS, SIZES
from tests.support.gpus import spawn
from tests.support.modelopt import fake_quantized, range_of
from tests.support.strategies import random_state, tiny

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(importlib.util.find_spec("modelopt") is None, reason="ModelOpt is not installed"),
]
FAMILIES = {
    "qwen3": tiny("qwen3", **SIZES),
    "qwen3_moe": tiny("qwen3_moe", **{**SIZES, **EXPERTS}, num_experts=8, mlp_only_layers=[1]),
}
BACKENDS = ["te", "torch"] if importlib.util.find_spec("transformer_engine") else ["torch"]
STEPS, ROWS, LONG = 3, 4, 64


def log_probs(models, hf, **how):
    """Log-probs of random rows, [rows, tokens]."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, hf.vocab_size, (ROWS, LONG), generator=generator).cuda()
    return mb.forward(models, ids, torch.ones_like(ids), micro_batch_size=2, **how).log_probs.detach()


def build(hf, backend, weights):
    return mb.build_model(hf, dims=mb.ParallelDims(), dtype=torch.bfloat16, backend=backend, load_weights=weights)


def unlike(models, served):
    """For all quantized weights: numbers that are not in the quantizer's range, and the largest share of other codes.

    Both the quantizer's own numbers and the numbers of the saved folder must be in this range. A step of bf16 more or
    less does not count.
    """
    trained, saved = (dict(chunk.named_parameters()) for (chunk,) in (models, served))
    names, wrong, shares = local_names(models[0]), 0, []
    for (canonical, *_), _, quantizer in quantizers_of(models):
        weight, own = trained[names[canonical]].detach(), saved[names[canonical]].detach().float()
        made = quantizer(weight).float()
        low, high = range_of(weight, quantizer.amax)
        step = 2**-7 * own.abs()
        for numbers in (made, own):
            wrong += int(((numbers < low - step) | (numbers > high + step)).sum())
        shares.append(float(((made - own).abs() > step).float().mean()))
    assert len(shares) > 1
    return wrong, max(shares)


def rank_main(rank, world_size, folder, backend):
    """For each family: errors of log-probs of the saved folder and of plain weights, and the result of ``unlike``."""
    mb.ParallelDims().initialize(device="cuda")
    found = {}
    for family, hf in FAMILIES.items():
        models = build(hf, backend, random_state(hf, dtype=torch.bfloat16))
        fake_quantized(models[0])
        optimizer = torch.optim.AdamW(models[0].parameters(), lr=1e-3)
        for _ in range(STEPS):
            log_probs(models, hf, loss=lambda outputs, rows: -outputs.log_probs.mean())
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        computed = log_probs(models, hf)
        mb.save_hf_checkpoint(models, f"{folder}/{family}", quantize=qat_format(models))
        served = build(f"{folder}/{family}", backend, True)
        plain = build(hf, backend, mb.to_hf_state_dict(models))
        errors = [float((log_probs(each, hf) - computed).abs().mean()) for each in (served, plain)]
        found[family] = *errors, *unlike(models, served)
        print(family, *found[family], flush=True)
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_qat_leaves_with_the_weights_with_which_it_computes(backend, tmp_path):
    (found,) = spawn(rank_main, tmp_path, 1, str(tmp_path), backend)
    assert all(own < 0.2 * other and not wrong for own, other, wrong, _ in found.values()), found
    assert all(share < 0.02 for *_, share in found.values()), found  # 0.002 and 0.011 on an H200
