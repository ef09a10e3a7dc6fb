"""Every way in which context-parallel ranks exchange keys (``cp_comm_type``), on real GPUs with TransformerEngine.

The reference is torch's attention in fp32 on an equal mesh. Log-probs and gradients in bf16 may have twice the error of
torch's attention in bf16, since ways differ only in the order of sums. Every expert gets every token: otherwise routers
that choose differently in bf16 would cause most of the error.
"""

import importlib.util
import traceback

import pytest
import torch

import mcore_bridge as mb
from mcore_bridge.batches.refusals import ROWS_ONLY
from mcore_bridge.factory.modules.te_attention import CP_COMM_TYPES
from tests.support import records
from tests.support.gpu_models import LATENT, SIZES
from tests.support.gpu_steps import distances, learn
from tests.support.gpus import spawn
from tests.support.strategies import random_state, tiny

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(not importlib.util.find_spec("transformer_engine"), reason="needs TransformerEngine"),
]

HEADS = {**SIZES, "num_attention_heads": 16, "num_key_value_heads": 8}
FAMILIES = {
    "qwen3": tiny("qwen3", **HEADS),
    "mistral": tiny("mistral", **HEADS, sliding_window=8),
    "deepseek_v3": tiny("deepseek_v3", **{**SIZES, **LATENT, "num_experts_per_tok": LATENT["n_routed_experts"]}),
}
"""Heads of one size, windows, and latent heads, whose keys and values have different sizes. TP2 and CP4 divide the
keys; otherwise torch's attention would be used.
"""
MESHES = {
    2: [mb.ParallelDims(cp=2), mb.ParallelDims(cp=2, hierarchical_context_parallel_sizes=(2, 1))],
    4: [mb.ParallelDims(cp=4, hierarchical_context_parallel_sizes=(2, 2)), mb.ParallelDims(tp=2, cp=2, sp=True)],
    8: [mb.ParallelDims(tp=2, cp=4, sp=True, hierarchical_context_parallel_sizes=(2, 2))],
}


def examine(hf, dims, state):
    """For each way, the errors of log-probs and gradients, divided by the errors of torch's attention in bf16."""
    exact = learn(hf, dims, state, packed=False, dtype=torch.float32, backend="torch")
    allowed = distances(learn(hf, dims, state, packed=False, backend="torch"), exact)
    print(dims, hf.model_type, "torch in bf16:", allowed, flush=True)
    found = {}
    for kind in CP_COMM_TYPES:
        if kind == "a2a+p2p" and dims.hierarchical_context_parallel_sizes is None:
            continue
        for packed in (True, False):
            if packed and kind in ROWS_ONLY:
                continue
            there = learn(hf, dims, state, packed=packed, backend="te", overrides={"cp_comm_type": kind})
            ratios = [own / most for own, most in zip(distances(there, exact), allowed, strict=True)]
            found[kind, "packed" if packed else "rows"] = ratios
    return found


def rank_main(rank, world_size):
    """Check every family, with every way of exchange, on every mesh of this size."""
    from megatron.core import parallel_state

    findings = {}
    for dims in MESHES[world_size]:
        dims.initialize(device="cuda")
        for family, hf in FAMILIES.items():
            try:
                findings[str(dims), family] = examine(hf, dims, random_state(hf, dtype=torch.bfloat16))
            except Exception:
                findings[str(dims), family] = traceback.format_exc()
            if rank == 0:
                print(dims, family, findings[str(dims), family], flush=True)
        parallel_state.destroy_model_parallel()
    return findings


@pytest.mark.parametrize("world_size", MESHES)
def test_every_exchange_attends_to_all_tokens(world_size, tmp_path, request):
    found = [item for findings in spawn(rank_main, tmp_path, world_size) for item in findings.items()]
    passed = [(key, isinstance(ways, dict) and all(max(way) < 2 for way in ways.values())) for key, ways in found]
    records.append(request.config.getoption("--record"), "exchanges", world_size, passed)
    assert all(is_right for _, is_right in passed), found
