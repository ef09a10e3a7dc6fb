"""Models for tests on GPUs."""

import importlib.util

from tests.support import bailing, twins
from tests.support.strategies import tiny

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


EXAONE = {
    "activation_function": "silu",
    "embed_dropout": 0.0,
    "layer_norm_epsilon": 1e-4,
    "max_position_embeddings": 64,
    "num_key_value_heads": 2,
    "num_layers": 4,
    "rope_scaling": None,
    "rope_theta": 20000.0,
    "tie_word_embeddings": False,
}


SARVAM = {
    **EXPERTS,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "moe_router_enable_expert_bias": True,
    "n_group": 1,
    "norm_topk_prob": True,
    "num_experts": 8,
    "num_hidden_layers": 4,
    "num_shared_experts": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 20000.0,
    "routed_scaling_factor": 2.5,
    "score_function": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_qkv_bias": False,
}
SARVAM_MLA = {
    **SARVAM,
    **{name: value for name, value in LATENT.items() if not name.startswith("n_")},
    "head_dim": 96,
    "num_key_value_heads": 8,
    "q_head_dim": 96,
    "rope_scaling": {
        "type": "deepseek_yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 8.0,
        "beta_slow": 1.0,
    },
}


DENSE = {
    "llama": tiny("llama", **SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "qwen2": tiny("qwen2", **{**SIZES, "hidden_size": 512}),
    "qwen3": tiny("qwen3", **SIZES),
    "mistral": tiny("mistral", **SIZES, sliding_window=8),
    "gemma2": tiny("gemma2", **SIZES, query_pre_attn_scalar=100, sliding_window=8),
    "olmo2": tiny("olmo2", **{**SIZES, "head_dim": 32}),
    "phi3": tiny("phi3", **{**SIZES, "hidden_size": 512, "pad_token_id": 0}),
    "exaone": twins.read("exaone", {**SIZES, **EXAONE}),
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
    "sarvam_moe": twins.read("sarvam_moe", {**SIZES, **SARVAM}),
    "sarvam_mla": twins.read("sarvam_mla", {**SIZES, **SARVAM_MLA}),
    "bailing_moe_v2": twins.read("bailing_moe_v2", {**bailing.TINY["grouped"], **SIZES, **LING}),
}


FAMILIES = {**DENSE, **SPARSE}


WITH_EXPERTS = tiny(
    "qwen3_moe",
    **{**SIZES, **EXPERTS},
    num_experts=8,
    mlp_only_layers=[1],
    architectures=["Qwen3MoeForCausalLM"],
)
"""A config of which the files are large enough for several slots."""
