"""Layers of one half each, in all of its kinds: Mamba-2 mixers, attention without rope, MLPs and routed experts."""

from tests.zoo import case

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
CASES = {
    "nemotron_h": case("nemotron_h", **NEMOTRON_H, vocab_size=97),
    "nemotron_h-narrow-experts": case("nemotron_h", **NEMOTRON_H, moe_latent_size=20),
    "nemotron_h-no-experts": case("nemotron_h", **{**NEMOTRON_H, "layers_block_type": NO_EXPERTS}),
}
