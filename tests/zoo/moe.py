"""Routed experts behind grouped-query attention: softmax scores, normalised or not, shared experts, dense layers."""

from tests.zoo import case

EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
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
}
