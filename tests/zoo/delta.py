"""Linear attention by the gated delta rule, next to gated full attention: heads shared and not, biases, odd kernels."""

from typing import Any

from tests.zoo import Case, case

LINEAR = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
}
ONE_EACH = {"linear_num_value_heads": 4, "linear_conv_kernel_dim": 3, "linear_value_head_dim": 6}
SQUARE = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 64, "head_dim": 8}


def delta(model_type: str, **fields: Any) -> Case:
    return case(model_type, **{**LINEAR, "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-3, **fields})


CASES = {
    "qwen3.5": delta("qwen3_5_text", vocab_size=97),
    "qwen3.5-biases-tied": delta("qwen3_5_text", attention_bias=True, tie_word_embeddings=True),
    "qwen3.5-one-value-head-each": delta("qwen3_5_text", **ONE_EACH),
    "qwen3.5-square": delta("qwen3_5_text", **SQUARE, layer_types=None),
}
