"""Families with small submodules of the layer: residuals with a multiplier, attention and MLP side by side."""

from tests.zoo import case
from tests.zoo.latent import GROUPED, latent
from tests.zoo.norms import WINDOWED

MULTIPLIERS = {
    "embedding_multiplier": 5.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.3,
    "logits_scaling": 3.0,
}
EXPERTS = {"hidden_size": 192, "num_local_experts": 4, "num_experts_per_tok": 2}
SIDE = {"head_dim": 24, "hidden_size": 192, "layer_norm_eps": 1e-3, "logit_scale": 0.3, "pad_token_id": 0}
NEOX = {"num_key_value_heads": 8, "hidden_size": 192, "layer_norm_eps": 1e-3}
PHI = {"hidden_size": 192, "layer_norm_eps": 1e-3, "qk_layernorm": True}
CASES = {
    "granite": case("granite", **MULTIPLIERS, attention_bias=True, mlp_bias=True, vocab_size=97),
    "granitemoe": case("granitemoe", **MULTIPLIERS, **EXPERTS, tie_word_embeddings=True),
    "granitemoeshared": case(
        "granitemoeshared", **MULTIPLIERS, **EXPERTS, shared_intermediate_size=56, attention_bias=True
    ),
    "cohere": case("cohere", **SIDE, tie_word_embeddings=True, vocab_size=97),
    "cohere-normed-heads": case("cohere", **SIDE, use_qk_norm=True, attention_bias=True),
    "cohere2": case("cohere2", **SIDE, **WINDOWED, attention_bias=True),
    "cohere2_moe": case(
        "cohere2_moe",
        **{**SIDE, **WINDOWED},
        num_experts=4,
        num_experts_per_tok=2,
        num_shared_experts=2,
        prefix_dense_intermediate_size=72,
        mlp_layer_types=["dense", "dense", "sparse", "sparse"],
    ),
    "cohere2_moe-sigmoid-rms": case(
        "cohere2_moe",
        **{**SIDE, **WINDOWED},
        num_experts=4,
        num_experts_per_tok=2,
        expert_selection_fn="sigmoid",
        rms_norm_eps=1e-3,
        tie_word_embeddings=True,
    ),
    "gpt_neox": case("gpt_neox", **NEOX, vocab_size=97, use_parallel_residual=True),
    "gpt_neox-one-by-one": case("gpt_neox", **NEOX, use_parallel_residual=False, hidden_act="gelu_fast"),
    "phi": case("phi", **PHI, vocab_size=97, resid_pdrop=0.1, embd_pdrop=0.2),
    "axk1": latent("axk1", **GROUPED, first_k_dense_replace=1, vocab_size=97),
}
