"""Routed experts behind grouped-query attention: softmax scores, normalised or not, shared experts, dense layers."""

from tests.zoo import NEWEST, case, rope
from tests.zoo.dense import YARN

EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
SIGMOID = {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 2, "norm_topk_prob": True}
GROUPED = {"n_routed_experts": 8, "num_experts_per_tok": 4}
GROUPED |= {"n_group": 4, "topk_group": 2} if NEWEST else {"n_group": 1, "topk_group": 1}
"""transformers 4.57 ranks experts of unchosen groups above experts with negative scores."""
SWIGLU_LIMIT = 0.5 if NEWEST else 7.0
"""transformers 4.57 always clamps at 7, and ignores the config."""
CASES = {
    "qwen3_moe": case("qwen3_moe", **EXPERTS, num_experts=4, norm_topk_prob=True, mlp_only_layers=[1]),
    "qwen3_moe-window-bias": case(
        "qwen3_moe",
        **{**EXPERTS, "num_experts_per_tok": 3},
        num_experts=8,
        norm_topk_prob=False,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=5,
        decoder_sparse_step=2,
    ),
    "qwen2_moe": case(
        "qwen2_moe",
        **EXPERTS,
        num_experts=4,
        hidden_size=192,
        norm_topk_prob=False,
        shared_expert_intermediate_size=56,
    ),
    "qwen2_moe-normalised-no-bias": case(
        "qwen2_moe",
        **EXPERTS,
        num_experts=8,
        hidden_size=192,
        norm_topk_prob=True,
        qkv_bias=False,
        shared_expert_intermediate_size=56,
        tie_word_embeddings=True,
    ),
    "mixtral": case("mixtral", num_local_experts=4, num_experts_per_tok=2),
    "mixtral-window": case("mixtral", num_local_experts=8, num_experts_per_tok=3, sliding_window=5),
    "gpt_oss": case(
        "gpt_oss",
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=5,
        **rope("yarn", **YARN, truncate=False),
    ),
    "gpt_oss-uneven-clamped": case(
        "gpt_oss",
        num_local_experts=8,
        num_experts_per_tok=3,
        sliding_window=6,
        swiglu_limit=SWIGLU_LIMIT,
        hidden_size=64,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        **rope("default"),
    ),
    "dots1": case("dots1", **SIGMOID, n_group=1, topk_group=1, first_k_dense_replace=2, attention_bias=True),
    "dots1-groups-window": case(
        "dots1",
        **{**SIGMOID, **GROUPED},
        sliding_window=5,
        max_window_layers=2,
        routed_scaling_factor=2.5,
    ),
    "glm4_moe": case(
        "glm4_moe", **SIGMOID, n_group=1, topk_group=1, use_qk_norm=True, attention_bias=True, routed_scaling_factor=1.5
    ),
    "glm4_moe-groups": case(
        "glm4_moe",
        **{**SIGMOID, **GROUPED},
        use_qk_norm=True,
    ),
    "glm4_moe-plain": case("glm4_moe", **SIGMOID, n_group=1, topk_group=1, use_qk_norm=False, first_k_dense_replace=2),
    "hy_v3": case(
        "hy_v3",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        num_shared_experts=2,
        attention_bias=True,
    ),
    "olmoe": case("olmoe", num_experts=4, num_experts_per_tok=2, head_dim=6, attention_bias=True),
    "olmoe-normalised": case("olmoe", num_experts=8, num_experts_per_tok=3, head_dim=6, norm_topk_prob=True),
    "flex_olmo": case(
        "flex_olmo", num_experts=4, num_experts_per_tok=2, head_dim=6, attention_bias=True, pad_token_id=0
    ),
    "minimax_m2": case("minimax_m2", num_local_experts=4, num_experts_per_tok=2, **rope("default")),
    "minimax_m2-partial": case(
        "minimax_m2", num_local_experts=8, num_experts_per_tok=3, **rope("default", partial_rotary_factor=0.5)
    ),
    "exaone_moe": case("exaone_moe", **EXPERTS, num_experts=4, num_shared_experts=2, sliding_window=5, head_dim=24),
    "exaone_moe-groups": case(
        "exaone_moe",
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        sliding_window=6,
        layer_types=["full_attention"] * 3 + ["sliding_attention"],
        first_k_dense_replace=2,
    ),
    "hunyuan_v1_moe": case("hunyuan_v1_moe", num_experts=4, moe_topk=2, attention_bias=True, **rope("default")),
}
