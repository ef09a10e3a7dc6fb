"""Linear attention by the gated delta rule, next to gated full attention: heads shared and not, biases, odd kernels."""

from typing import Any

from tests.zoo import Case, case, rope

LINEAR = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
}
ONE_EACH = {"linear_num_value_heads": 4, "linear_conv_kernel_dim": 3, "linear_value_head_dim": 6}
SQUARE = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 64, "head_dim": 8}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 56,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16, "partial_rotary_factor": 0.5}
IMAGES = {"mrope_section": [2, 1, 0], "mrope_interleaved": True}


def delta(model_type: str, **fields: Any) -> Case:
    return case(model_type, **{**LINEAR, "rms_norm_eps": 1e-3, **fields})


OLMO = {**LINEAR, "num_key_value_heads": 8, "linear_num_key_heads": 8, "rms_norm_eps": 1e-3, "pad_token_id": None}
CASES = {
    "olmo_hybrid": case("olmo_hybrid", **OLMO, vocab_size=97),
    "olmo_hybrid-no-rope": case(
        "olmo_hybrid",
        **{**OLMO, "num_key_value_heads": 2, "linear_conv_kernel_dim": 3},
        rope_parameters={"rope_type": "default", "rope_theta": None},
        linear_allow_neg_eigval=False,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "qwen3.5": delta("qwen3_5_text", vocab_size=97),
    "qwen3.5-biases-tied": delta("qwen3_5_text", attention_bias=True, tie_word_embeddings=True),
    "qwen3.5-one-value-head-each": delta("qwen3_5_text", **ONE_EACH),
    "qwen3.5-square": delta("qwen3_5_text", **SQUARE, layer_types=None, partial_rotary_factor=1.0),
    "qwen3.5-yarn-images": delta("qwen3_5_text", **rope("yarn", **YARN, **IMAGES)),
    "qwen3.5-moe": delta("qwen3_5_moe_text", **EXPERTS),
    "qwen3_next": delta("qwen3_next", **EXPERTS, vocab_size=97),
    "qwen3_next-dense": delta("qwen3_next", **EXPERTS, mlp_only_layers=[0, 1, 2, 3], attention_bias=True),
    "qwen3_next-square": delta(
        "qwen3_next", **{**SQUARE, **EXPERTS, **ONE_EACH}, decoder_sparse_step=2, norm_topk_prob=False
    ),
    "qwen3_next-rope": delta(
        "qwen3_next", **EXPERTS, layer_types=None, partial_rotary_factor=0.75, **rope("default", 5e5)
    ),
}
