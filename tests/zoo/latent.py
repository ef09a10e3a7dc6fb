"""Multi-latent attention: DeepSeek and similar families; with and without low-rank queries, yarn, experts."""

from tests.zoo import NEWEST, Case, case, rope

DIMS = {
    "num_key_value_heads": 8,
    "q_lora_rank": 28,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 10,
    "rms_norm_eps": 1e-3,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 2.5,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8.0, "beta_slow": 1.0}
DENSE = {"first_k_dense_replace": 4, "n_group": 1, "topk_group": 1}
ALL_GROUPS = {**DENSE, "n_group": 2, "topk_group": 2}
GROUPED = {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
MSCALE_ALL_DIM = 0.707 if NEWEST else 0.0
"""transformers 4.57 forgets the softmax scale of deepseek_v2's yarn, which its own code has."""


def latent(model_type: str, **fields: object) -> Case:
    """A case whose dims are pairwise distinct, with an epsilon that latents must not take."""
    return case(model_type, **{**DIMS, **fields})


CASES = {
    "deepseek_v3": latent("deepseek_v3", **GROUPED, first_k_dense_replace=1, vocab_size=97),
    "deepseek_v3-dense": latent("deepseek_v3", **DENSE),
    "deepseek_v3-yarn": latent("deepseek_v3", **DENSE, **rope("yarn", **YARN, mscale=1.3, mscale_all_dim=0.7)),
    "deepseek_v3-whole-queries": latent(
        "deepseek_v3",
        **{**DENSE, "first_k_dense_replace": 2, "n_group": 2, "topk_group": 2},
        q_lora_rank=None,
        tie_word_embeddings=True,
    ),
    "deepseek_v3-one-expert": latent(
        "deepseek_v3", **DENSE | {"first_k_dense_replace": 0}, num_experts_per_tok=1, norm_topk_prob=False
    ),
    "deepseek_v2": latent(
        "deepseek_v2",
        **{**rope("yarn", **YARN, mscale=0.707, mscale_all_dim=MSCALE_ALL_DIM), "q_lora_rank": None},
        first_k_dense_replace=1,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=4,
    ),
    "deepseek_v2-groups": latent(
        "deepseek_v2",
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        num_experts_per_tok=2,
        routed_scaling_factor=16.0,
        vocab_size=97,
    ),
    "glm4_moe_lite": latent("glm4_moe_lite", mlp_layer_types=["dense", "sparse", "sparse", "dense"]),
}
