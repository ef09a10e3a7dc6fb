"""Families whose layers have different sizes."""

from typing import Any

from tests.zoo import case
from tests.zoo.norms import WINDOWED, YARN_ROPE

SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
MIXED = {"mlp_layer_types": ["dense", "sparse", "sparse", "dense"], "shared_expert_intermediate_size": 56}


def shares(full: dict[str, Any], sliding: float) -> dict[str, Any]:
    """Ropes that rotate different shares of a head in full and in sliding layers."""
    own = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": sliding}
    return {"rope_parameters": {"full_attention": {"rope_theta": 5e4, **full}, "sliding_attention": own}}


HALF = {"rope_type": "default", "partial_rotary_factor": 0.5}
LAGUNA = {**WINDOWED, **SPARSE, **MIXED, "pad_token_id": 95, "moe_routed_scaling_factor": 2.5}
FULL = ["full_attention"] * 4
AFMOE = {**WINDOWED, **SPARSE, "num_shared_experts": 2, "num_dense_layers": 1, "route_scale": 2.5, "pad_token_id": 95}
PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.25}
SHARED_KEYS = {"attention_k_eq_v": True, "global_head_dim": 32, "num_global_key_value_heads": 2}
GEMMA4 = {**WINDOWED, "pad_token_id": 95, "hidden_size_per_layer_input": 0, "num_key_value_heads": 4}


INPUTS = {
    "layer_types": ["full_attention", "sliding_attention", "full_attention", "full_attention"],
    "hidden_size_per_layer_input": 20,
    "vocab_size_per_layer_input": 96,
}


def gemma4_ropes(full: dict[str, Any]) -> dict[str, Any]:
    sliding = {"rope_type": "default", "rope_theta": 500.0}
    return {"rope_parameters": {"full_attention": {"rope_theta": 5e4, **full}, "sliding_attention": sliding}}


STEP = {
    **{name: WINDOWED[name] for name in ("layer_types", "sliding_window")},
    **{name: SPARSE[name] for name in ("num_experts_per_tok", "moe_intermediate_size")},
    "n_routed_experts": 4,
    "share_expert_dim": 56,
    "mlp_layer_types": MIXED["mlp_layer_types"],
    "pad_token_id": 95,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 2.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
    "partial_rotary_factor": 0.5,
}

MIMO = {
    **{name: WINDOWED[name] for name in ("layer_types", "sliding_window")},
    **{name: SPARSE[name] for name in ("num_experts_per_tok", "moe_intermediate_size")},
    "n_routed_experts": 4,
    "v_head_dim": 16,
    "pad_token_id": 95,
}

INKLING = {
    **{name: SPARSE[name] for name in ("num_experts_per_tok", "moe_intermediate_size")},
    "n_routed_experts": 4,
    "layer_types": ["hybrid", "hybrid_sliding", "hybrid_sliding", "hybrid"],
    "mlp_layer_types": MIXED["mlp_layer_types"],
    "swa_num_attention_heads": 16,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 16,
    "sliding_window_size": 5,
    "d_rel": 6,
    "rel_extent": 9,
    "logits_mup_width_multiplier": 3.0,
    "route_scale": 2.5,
    "pad_token_id": 95,
}

CASES = {
    "inkling": case("inkling_text", **INKLING, log_scaling_n_floor=7, log_scaling_alpha=0.4, unpadded_vocab_size=91),
    "inkling-three-shared": case(
        "inkling_text",
        **{**INKLING, "mlp_layer_types": ["sparse"] * 4, "num_experts_per_tok": 1, "conv_kernel_size": 3},
        n_shared_experts=3,
        num_key_value_heads=1,
        vocab_size=97,
    ),
    "mimo_v2_flash": case(
        "mimo_v2_flash",
        **MIMO,
        **shares(HALF, 0.5),
        mlp_layer_types=MIXED["mlp_layer_types"],
        routed_scaling_factor=2.5,
    ),
    "mimo_v2_flash-biased": case(
        "mimo_v2_flash",
        **MIMO,
        **shares({**HALF, "partial_rotary_factor": 0.34}, 1.0),
        num_key_value_heads=1,
        attention_bias=True,
        attention_value_scale=None,
        vocab_size=97,
    ),
    "gemma4-own-values": case("gemma4_text", **GEMMA4, global_head_dim=32, **gemma4_ropes({"rope_type": "default"})),
    "gemma4-biased": case(
        "gemma4_text",
        **GEMMA4,
        **{**SHARED_KEYS, "num_global_key_value_heads": 1},
        **gemma4_ropes({**PROPORTIONAL, "partial_rotary_factor": 0.5, "factor": 4.0}),
        attention_bias=True,
        vocab_size=97,
    ),
    "gemma4-shared": case(
        "gemma4_text",
        **{**GEMMA4, "hidden_size_per_layer_input": 20, "num_key_value_heads": 2},
        **gemma4_ropes(PROPORTIONAL),
        global_head_dim=32,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        vocab_size_per_layer_input=97,
        vocab_size=97,
        tie_word_embeddings=True,
    ),
    "gemma4-shared-biased": case(
        "gemma4_text",
        **{**GEMMA4, **SHARED_KEYS, **INPUTS, "num_global_key_value_heads": 1},
        **gemma4_ropes(PROPORTIONAL),
        num_kv_shared_layers=1,
        attention_bias=True,
    ),
    "gemma4-unified": case(
        "gemma4_unified_text",
        **{name: GEMMA4[name] for name in GEMMA4 if name != "hidden_size_per_layer_input"},
        **{**SHARED_KEYS, "num_global_key_value_heads": 1},
        **gemma4_ropes(PROPORTIONAL),
        tie_word_embeddings=True,
    ),
    "gemma4-experts": case(
        "gemma4_text",
        **GEMMA4,
        **SHARED_KEYS,
        **gemma4_ropes(PROPORTIONAL),
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=40,
    ),
    "step3p5": case(
        "step3p5",
        **STEP,
        **shares(LLAMA3, 1.0),
        num_sliding_attention_heads=16,
        moe_router_scaling_factor=2.5,
        swiglu_limits=[0.0, 0.2, 0.4, 0.0],
        swiglu_limits_shared=[0.3, 0.0, 0.1, 0.0],
    ),
    "step3p5-equal-bias": case(
        "step3p5",
        **STEP,
        **shares(HALF, 0.5),
        query_pre_attn_scalar=4,
        attention_bias=True,
        swiglu_limits=[0.0, 0.0, 0.1, 0.0],
        tie_word_embeddings=True,
        vocab_size=97,
    ),
    "gemma4": case(
        "gemma4_text",
        **GEMMA4,
        **SHARED_KEYS,
        **gemma4_ropes(PROPORTIONAL),
        final_logit_softcapping=2.0,
        tie_word_embeddings=True,
        use_bidirectional_attention="vision",
    ),
    "afmoe": case("afmoe", **AFMOE, mup_enabled=True),
    "afmoe-biased-tied": case("afmoe", **AFMOE, attention_bias=True, tie_word_embeddings=True, vocab_size=97),
    "afmoe-all-full": case("afmoe", **{**AFMOE, "layer_types": FULL, "num_dense_layers": 0}),
    "laguna": case("laguna", **LAGUNA, **shares(HALF, 1.0), num_attention_heads_per_layer=[16, 8, 16, 8]),
    "laguna-elements-yarn-bias": case(
        "laguna",
        **LAGUNA,
        **shares({**YARN_ROPE, "partial_rotary_factor": 1.0}, 0.5),
        num_attention_heads_per_layer=[4, 8, 4, 16],
        gating="per-element",
        attention_bias=True,
        vocab_size=97,
    ),
    "laguna-equal": case("laguna", **LAGUNA, **shares(HALF, 0.5), tie_word_embeddings=True),
}
