"""On real GPUs over NCCL: build, load and export exactly with either backend, and logits against transformers."""

import importlib.util
import os
import traceback

import pytest
import torch

import mcore_bridge as mb
from tests import bailing, twins
from tests.gpus import spawn
from tests.parity import BATCH, SEQ, reference_logits, tokens
from tests.strategies import random_state, tiny

pytestmark = pytest.mark.multigpu

BACKENDS = ["torch", *(["te"] if importlib.util.find_spec("transformer_engine") else [])]
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 8, "vocab_size": 515}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 128, "num_key_value_heads": 2}
SIGMOID = {**EXPERTS, "n_routed_experts": 8, "n_shared_experts": 2, "n_group": 1, "topk_group": 1}
LATENT = {
    **SIGMOID,
    "num_key_value_heads": 8,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "head_dim": 32,
    "v_head_dim": 64,
    "first_k_dense_replace": 1,
}
LINEAR = {
    **EXPERTS,
    "num_experts": 8,
    "shared_expert_intermediate_size": 256,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
}
LING = {
    **EXPERTS,
    "max_position_embeddings": 128,
    "moe_shared_expert_intermediate_size": 128,
    "n_group": 1,
    "num_shared_experts": 1,
    "topk_group": 1,
}
DENSE = {
    "llama": tiny("llama", **SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "qwen2": tiny("qwen2", **{**SIZES, "hidden_size": 512}),
    "qwen3": tiny("qwen3", **SIZES),
    "mistral": tiny("mistral", **SIZES, sliding_window=8),
    "gemma2": tiny("gemma2", **SIZES, query_pre_attn_scalar=100, sliding_window=8),
    "olmo2": tiny("olmo2", **{**SIZES, "head_dim": 32}),
    "phi3": tiny("phi3", **{**SIZES, "hidden_size": 512, "pad_token_id": 0}),
    "mimo": twins.read("mimo", {**tiny("qwen2", **{**SIZES, "hidden_size": 512}).to_dict(), "attention_bias": True}),
}
SPARSE = {
    "qwen2_moe": tiny(
        "qwen2_moe",
        **{**SIZES, **EXPERTS, "hidden_size": 512},
        num_experts=8,
        shared_expert_intermediate_size=256,
    ),
    "qwen3_moe": tiny("qwen3_moe", **{**SIZES, **EXPERTS}, num_experts=8, mlp_only_layers=[1]),
    "mixtral": tiny("mixtral", **SIZES, num_local_experts=8, num_key_value_heads=2, num_experts_per_tok=2),
    "glm4_moe": tiny("glm4_moe", **{**SIZES, **SIGMOID}, use_qk_norm=True, attention_bias=True),
    "deepseek_v3": tiny("deepseek_v3", **{**SIZES, **LATENT}),
    "gpt_oss": tiny(
        "gpt_oss",
        **{**SIZES, "intermediate_size": 128},
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=8,
        num_key_value_heads=2,
    ),
    "qwen3_next": tiny("qwen3_next", **{**SIZES, **LINEAR}),
    "kimi_k2": twins.read("kimi_k2", tiny("deepseek_v3", **{**SIZES, **LATENT}).to_dict()),
    "bailing_moe_v2": twins.read("bailing_moe_v2", {**bailing.TINY["grouped"], **SIZES, **LING}),
}
FAMILIES = {**DENSE, **SPARSE}
DIMS = [
    mb.ParallelDims(),
    mb.ParallelDims(tp=2, sp=True),
    mb.ParallelDims(pp=2, vp=2),
    mb.ParallelDims(ep=2),
    mb.ParallelDims(tp=2, ep=2, sp=True),
    mb.ParallelDims(tp=2, pp=2, ep=2, sp=True),
    mb.ParallelDims(tp=2, ep=2, etp=2, sp=True),
    mb.ParallelDims(tp=4, sp=True),
]


def rank_main(rank, world_size, dims):
    """Every family and backend on this mesh."""
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"  # TransformerEngine's fp32 would have a mantissa of 10 bits
    dims.initialize(device="cuda")
    findings = {}
    for family, hf in (SPARSE if dims.ep > 1 else FAMILIES).items():
        if hf.model_type == "gpt_oss" and dims.etp > 1:  # megatron-core cannot cut experts with biases
            continue
        for backend in BACKENDS:
            try:
                findings[family, backend] = examine(hf, dims, backend)
            except Exception:  # the others are examined all the same
                findings[family, backend] = traceback.format_exc(), None
    return findings


def examine(hf, dims, backend):
    """What came back other than it went, in bf16; and on one stage the fp32 logits."""
    state = random_state(hf, dtype=torch.bfloat16)
    models = mb.build_model(hf, dims=dims, backend=backend, load_weights=state)
    exported = mb.to_hf_state_dict(models, bucket_bytes=1 << 20, device="cpu")
    wrong = sorted(state.keys() ^ exported.keys())
    wrong += [name for name in exported.keys() & state.keys() if not torch.equal(exported[name], state[name])]
    if dims.pp > 1:
        return str(wrong) if wrong else "", None
    (model,) = mb.build_model(hf, dims=dims, backend=backend, dtype=torch.float32, load_weights=random_state(hf))
    model.eval()
    with torch.no_grad():
        positions = torch.arange(SEQ, device="cuda").expand(BATCH, SEQ)
        logits = model(tokens(hf).cuda(), positions, None)
    parts = [torch.empty_like(logits) for _ in range(dims.tp)]
    torch.distributed.all_gather(parts, logits.contiguous(), group=model.pg_collection.tp)
    return str(wrong) if wrong else "", torch.cat(parts, -1)[..., : hf.vocab_size].float().cpu()


@pytest.fixture(scope="module")
def references():
    return {family: reference_logits(hf) for family, hf in FAMILIES.items()}


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_every_family_and_backend(dims, tmp_path, references):
    failures = []
    for rank, findings in enumerate(spawn(rank_main, tmp_path, dims.smallest_world, dims)):
        for (family, backend), (wrong, logits) in findings.items():
            if wrong:
                failures.append(f"{family} {backend} on rank {rank}: {wrong}")
            elif logits is not None:
                worst = float((logits - references[family]).abs().max() / references[family].std())
                print(f"{dims}: {family} {backend}: fp32 logits differ by {worst:.2e} of their spread")
                if not worst < 1e-4:
                    failures.append(f"{family} {backend} on rank {rank}: logits differ by {worst}")
    assert not failures, "\n".join(failures)
