"""Llama 4: layers that attend within chunks beside layers without a rope, and experts whose input is scaled."""

from tests.zoo import NEWEST, case, rope
from tests.zoo.dense import LLAMA3

SIZES = {"intermediate_size": 32, "intermediate_size_mlp": 80, "num_local_experts": 4}
TUNED = {"floor_scale": 4, "attn_scale": 0.5}
BIASED = {"attention_bias": True} if NEWEST else {}
"""transformers 4.57 never has these biases. That of keys has no gradient in layers without a rope and without norms."""
CASES = {
    "llama4": case(
        "llama4_text",
        **{**SIZES, **TUNED},
        vocab_size=97,
        attention_chunk_size=5,
        no_rope_layers=[1, 0, 1, 0],
        interleave_moe_layer_step=2,
        **rope("llama3", **LLAMA3),
    ),
    "llama4-other-layers": case(
        "llama4_text",
        **{**SIZES, **BIASED},
        attention_chunk_size=7,
        layer_types=["full_attention", "chunked_attention", "chunked_attention", "full_attention"],
        no_rope_layers=[1, 1, 0, 0],
        moe_layers=[0, 1, 3],
        attn_temperature_tuning=False,
        use_qk_norm=False,
        tie_word_embeddings=True,
    ),
}
