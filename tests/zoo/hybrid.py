"""Layers with Mamba-2 mixers or short convolutions, layers with only a mixer, attention, an MLP or experts."""

from tests.zoo import case, rope
from tests.zoo.latent import DIMS
from tests.zoo.plain import LLAMA3
from tests.zoo.submodules import EXPERTS as OF_GRANITE
from tests.zoo.submodules import MULTIPLIERS

MIXER = {"mamba_num_heads": 8, "mamba_head_dim": 10, "n_groups": 4, "ssm_state_size": 6, "conv_kernel": 3}
EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 56,
}
ALL = ["linear_attention", "moe", "full_attention", "mlp"]
NO_EXPERTS = ["linear_attention", "mlp", "full_attention", "linear_attention"]
NEMOTRON_H = {
    **MIXER,
    **EXPERTS,
    "layers_block_type": ALL,
    "layer_norm_epsilon": 1e-3,
    "time_step_min": 1e-30,  # transformers alone raises smaller time steps to it, and cannot begin with 0
    "routed_scaling_factor": 2.5,
}
GRANITE = {
    **MULTIPLIERS,
    **OF_GRANITE,
    "attention_multiplier": 0.05,  # sharper scores would make rounding errors of transformers' gradients large
    "shared_intermediate_size": 56,
    "layer_types": ["mamba", "attention", "mamba", "mamba"],
    "mamba_n_heads": 8,
    "mamba_expand": 1,
    "mamba_d_head": 24,
    "mamba_d_state": 12,
    "mamba_d_conv": 3,
}
FALCON = {
    "hidden_size": 192,
    "mamba_n_heads": 8,
    "mamba_d_head": 12,
    "mamba_d_ssm": 96,
    "mamba_d_state": 16,
    "mamba_d_conv": 3,
    "embedding_multiplier": 5.0,
    "lm_head_multiplier": 0.3,
    "mlp_multipliers": [0.8, 0.6],
    "key_multiplier": 0.4,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.7,
    "ssm_multipliers": [0.35, 0.25, 0.4, 0.5, 0.9],
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.24,
    "pad_token_id": None,  # in transformers, the row of a padding token gets no gradient
}
CONVOLUTIONS = {
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "conv_L_cache": 4,
    "norm_eps": 1e-3,
    "pad_token_id": None,
}
OF_LFM = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LFM3 = {
    **CONVOLUTIONS,
    "layer_types": ["conv", "full_attention", "conv", "sliding_attention"],
    "sliding_window": 5,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 5e4, "partial_rotary_factor": 0.25},
    },
    "head_dim": 16,
}
KIMI = {
    **{name: DIMS[name] for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")},
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-3,
    "head_dim": 8,
    "pad_token_id": None,
    "linear_num_heads": 4,
    "linear_head_dim": 12,
    "linear_conv_kernel_dim": 3,
    "num_experts": 8,
    "num_shared_experts": 2,
    "num_experts_per_token": 3,
    "moe_intermediate_size": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}
LING = {
    **{name: DIMS[name] for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")},
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-3,
    "head_dim": 14,
    "pad_token_id": None,
    "short_conv_kernel_size": 3,
    "num_experts": 16,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,
    "num_shared_experts": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "kda_lower_bound": -4.0,
    "num_mtp_layers": 0,
}
CASES = {
    "bailing_hybrid": case("bailing_hybrid", **LING, layer_group_size=2, vocab_size=97),
    "bailing_hybrid-unbounded-low-rank-queries": case(
        "bailing_hybrid",
        **{**LING, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1},
        layer_types=KIMI["layer_types"],
        kda_safe_gate=False,
        q_lora_rank=28,
        rope_parameters={"rope_type": "default", "rope_theta": 6e6, "partial_rotary_factor": 0.5},
    ),
    "kimi_linear": case("kimi_linear", **KIMI, mlp_layer_types=["dense", "sparse", "sparse", "dense"], vocab_size=97),
    "kimi_linear-low-rank-queries": case(
        "kimi_linear",
        **{**KIMI, "layer_types": KIMI["layer_types"][::-1], "num_shared_experts": 1},
        q_lora_rank=28,
        mlp_layer_types=["sparse"] * 4,
        routed_scaling_factor=2.5,
    ),
    "lfm2": case("lfm2", **CONVOLUTIONS, vocab_size=97, block_multiple_of=12, block_ffn_dim_multiplier=1.4),
    "lfm2-tied": case(
        "lfm2",
        **{**CONVOLUTIONS, **rope("llama3", **LLAMA3), "conv_L_cache": 3},
        block_auto_adjust_ff_dim=False,
        tie_word_embeddings=True,
    ),
    "lfm3": case("lfm3", **LFM3, attention_bias=True, vocab_size=97),
    "lfm3-plain": case(
        "lfm3",
        **{**LFM3, "layer_types": ["sliding_attention", "conv", "full_attention", "conv"]},
        use_sandwich_norm=False,
        use_attention_gate=False,
        tie_word_embeddings=True,
    ),
    "lfm2_moe": case(
        "lfm2_moe", **CONVOLUTIONS, **OF_LFM, num_dense_layers=1, routed_scaling_factor=2.5, vocab_size=97
    ),
    "lfm2_moe-no-bias": case(
        "lfm2_moe", **CONVOLUTIONS, **OF_LFM, num_dense_layers=2, use_expert_bias=False, tie_word_embeddings=True
    ),
    "nemotron_h": case("nemotron_h", **NEMOTRON_H, vocab_size=97),
    "nemotron_h-narrow-experts": case("nemotron_h", **NEMOTRON_H, moe_latent_size=20),
    "granitemoehybrid": case(
        "granitemoehybrid",
        **{**GRANITE, **rope("default", 20000.0)},
        position_embedding_type="rope",
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "granitemoehybrid-no-experts": case(
        "granitemoehybrid",
        **{**GRANITE, "num_local_experts": 0},
        position_embedding_type="nope",  # the bias of keys would have no gradient
        vocab_size=97,
    ),
    "falcon_h1": case("falcon_h1", **FALCON, mamba_norm_before_gate=False, vocab_size=97),
    "falcon_h1-normed": case(
        "falcon_h1",
        **FALCON,
        mamba_rms_norm=True,
        mamba_norm_before_gate=False,
        mamba_n_groups=2,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "nemotron_h-no-experts": case("nemotron_h", **{**NEMOTRON_H, "layers_block_type": NO_EXPERTS, "n_groups": 2}),
}
