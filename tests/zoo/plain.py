"""Families that differ from llama only in norm, activation, rope, biases and fused projections."""

from typing import Any

import transformers

from tests.zoo import case, rope

SPEAKS_4 = transformers.__version__.startswith("4.")
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8.0, "beta_slow": 1.0}
TEMPERED = {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4, "max_position_embeddings": 64}
PHI = {"hidden_size": 128, "head_dim": 16, "pad_token_id": 95}  # by default outside of the vocabulary


def partial(factor: float) -> dict[str, Any]:
    """The default rope on a part of each head, as the installed transformers spells it; some have both spellings."""
    spelled = rope("default") if SPEAKS_4 else rope("default", partial_rotary_factor=factor)
    return {**spelled, "partial_rotary_factor": factor}


def longrope(num_pairs: int, *, original: int) -> dict[str, Any]:
    """Other frequencies for more than ``original`` tokens, in Phi-3's spelling in both versions of transformers.

    Release 4.57 accepts only these three keys.
    """
    factors = {
        "short_factor": [1.0 + 0.02 * pair for pair in range(num_pairs)],
        "long_factor": [1.5 + 0.3 * pair for pair in range(num_pairs)],
    }
    spelled = {"rope_theta": 10000.0, "rope_scaling": {"type": "longrope", **factors}}
    return {**spelled, "max_position_embeddings": 128, "original_max_position_embeddings": original}


BIASED = {"attention_bias": True, "mlp_bias": True}
SLIDING = {"use_sliding_window": True, "sliding_window": 5, "layer_types": None}
CASES = {
    "seed_oss": case("seed_oss", residual_dropout=0.2, attention_dropout=0.1, vocab_size=97),
    "seed_oss-all-biases": case("seed_oss", attention_out_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "seed_oss-no-bias": case("seed_oss", attention_bias=False, **rope("yarn", **YARN)),
    "arcee": case("arcee", **BIASED, **rope("yarn", **YARN), vocab_size=97),
    "apertus": case("apertus", attention_bias=True, vocab_size=97, pad_token_id=95, **rope("llama3", **LLAMA3)),
    "apertus-no-bias": case("apertus", tie_word_embeddings=True, pad_token_id=95, **rope("default")),
    "arcee-no-bias": case("arcee", tie_word_embeddings=True),
    "helium": case("helium", hidden_size=192, attention_bias=True, vocab_size=97, rms_norm_eps=1e-5),
    "helium-square": case("helium", hidden_size=64, head_dim=8, intermediate_size=64, vocab_size=64),
    "ernie4_5": case("ernie4_5", use_bias=True, vocab_size=97, tie_word_embeddings=True),
    "ernie4_5-no-bias": case("ernie4_5", **rope("llama3", **LLAMA3)),
    "smollm3": case("smollm3", **BIASED, **SLIDING, vocab_size=97, no_rope_layers=[1, 0, 1, 0], pad_token_id=95),
    "smollm3-interval": case("smollm3", no_rope_layer_interval=2, pad_token_id=95),
    "smollm3-rope-everywhere": case(
        "smollm3", no_rope_layers=[1] * 4, pad_token_id=95, tie_word_embeddings=True, **rope("yarn", **YARN)
    ),
    "nemotron": case("nemotron", **BIASED, vocab_size=97, norm_eps=1e-4, **partial(0.25)),
    "nemotron-whole": case("nemotron", tie_word_embeddings=True, **partial(1.0)),
    "starcoder2": case(
        "starcoder2",
        hidden_size=192,
        vocab_size=97,
        sliding_window=5,
        norm_epsilon=1e-4,
        residual_dropout=0.2,
        embedding_dropout=0.3,
        attention_dropout=0.1,
    ),
    "starcoder2-no-bias": case("starcoder2", hidden_size=192, use_bias=False, tie_word_embeddings=True),
    "stablelm": case(
        "stablelm",
        **partial(0.25),
        use_qkv_bias=True,
        hidden_size=192,
        vocab_size=97,
        layer_norm_eps=1e-4,
        attention_dropout=0.1,
    ),
    "stablelm-no-bias": case("stablelm", hidden_size=192, tie_word_embeddings=True, **partial(0.5)),
    "ministral3": case("ministral3", sliding_window=11, vocab_size=97, **rope("yarn", **YARN, **TEMPERED)),
    "ministral3-default-rope": case("ministral3", rope_parameters=None, max_position_embeddings=64),
    "phi3": case("phi3", **PHI, sliding_window=5, vocab_size=97, resid_pdrop=0.2, attention_dropout=0.1),
    "phi3-partial": case("phi3", **PHI, tie_word_embeddings=True, **partial(0.75)),
    "phi3-longrope-within": case("phi3", **PHI, **longrope(8, original=64)),
    "phi3-longrope-beyond": case("phi3", **PHI, **longrope(6, original=16), partial_rotary_factor=0.75),
}
