"""Families with norms in other places, soft caps, scales, and ropes that differ by layer."""

from typing import Any

import transformers

from tests.zoo import case, rope
from tests.zoo.dense import LLAMA3, YARN
from tests.zoo.plain import partial

KINDS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
WINDOWED = {"sliding_window": 5, "layer_types": KINDS}


def ropes(full: dict[str, Any], *, base: float = 50000.0, sliding_base: float = 500.0) -> dict[str, Any]:
    """The rope of full layers and the default rope of sliding layers, as the installed transformers spells them."""
    if transformers.__version__.startswith("4."):
        local = {} if base == sliding_base else {"rope_local_base_freq": sliding_base}
        return {"rope_theta": base, "rope_scaling": full if "factor" in full else None, **local}
    kinds = {"full_attention": (full, base), "sliding_attention": ({"rope_type": "default"}, sliding_base)}
    return {"rope_parameters": {kind: {**each, "rope_theta": theta} for kind, (each, theta) in kinds.items()}}


GEMMA2 = {
    "query_pre_attn_scalar": 20,
    "attn_logit_softcapping": 0.7,
    "final_logit_softcapping": 2.0,
    "attention_bias": True,
}
YARN_ROPE = {"rope_type": "yarn", **YARN, "attention_factor": 1.3}
DYNAMIC = {**ropes({"rope_type": "dynamic", "factor": 4.0}), "max_position_embeddings": 16}
HUNYUAN = {"type": "dynamic", "alpha": 30.0, "factor": 1.0, "mscale": 1.0, "beta_fast": 32, "beta_slow": 1}
CASES = {
    "olmo": case("olmo", vocab_size=97, clip_qkv=0.05),
    "olmo-bias-tied": case("olmo", attention_bias=True, tie_word_embeddings=True, num_key_value_heads=1),
    "nanochat": case("nanochat", vocab_size=97, final_logit_softcapping=2.0),
    "nanochat-bias-tied": case(
        "nanochat", attention_bias=True, tie_word_embeddings=True, final_logit_softcapping=None, rms_norm_eps=1e-3
    ),
    "olmo2": case("olmo2", vocab_size=97),
    "olmo2-bias-tied": case("olmo2", attention_bias=True, tie_word_embeddings=True, rms_norm_eps=1e-3),
    "olmo2-one-group": case("olmo2", num_key_value_heads=1, rope_scaling={"type": "linear", "factor": 4.0}),
    "olmo3": case("olmo3", **WINDOWED, **ropes({"rope_type": "default"}, sliding_base=50000.0)),
    "olmo3-yarn-bias": case("olmo3", **WINDOWED, **ropes(YARN_ROPE, sliding_base=50000.0), attention_bias=True),
    "gemma": case("gemma", tie_word_embeddings=True),
    "gemma-bias-untied": case("gemma", attention_bias=True, vocab_size=97),
    "gemma2": case("gemma2", **WINDOWED, **GEMMA2, tie_word_embeddings=True, vocab_size=97),
    "gemma2-uncapped": case("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None, **WINDOWED),
    "gemma2-full": case("gemma2", **GEMMA2, layer_types=["full_attention"] * 4),
    "vaultgemma": case("vaultgemma", **WINDOWED, **GEMMA2, tie_word_embeddings=True, vocab_size=97),
    "vaultgemma-biases": case("vaultgemma", **WINDOWED, attention_bias=True, attn_logit_softcapping=None),
    "gemma3": case("gemma3_text", **WINDOWED, **ropes({"rope_type": "default"}), tie_word_embeddings=True),
    "gemma3-linear": case(
        "gemma3_text",
        **WINDOWED,
        **ropes({"rope_type": "linear", "factor": 8.0}),
        final_logit_softcapping=2.0,
        attention_bias=True,
        query_pre_attn_scalar=20,
    ),
    "gemma3-dynamic": case("gemma3_text", **WINDOWED, **DYNAMIC),
    "exaone4": case("exaone4", **WINDOWED),
    "exaone4-full": case(
        "exaone4", sliding_window=None, layer_types=["full_attention"] * 4, **rope("llama3", **LLAMA3)
    ),
    "hunyuan": case("hunyuan_v1_dense", attention_bias=True, vocab_size=97, rope_scaling=HUNYUAN),
    "hunyuan-plain-rope": case("hunyuan_v1_dense", tie_word_embeddings=True, rms_norm_eps=1e-3),
    "glm4": case(
        "glm4",
        vocab_size=97,
        rms_norm_eps=1e-3,
        pad_token_id=0,
        rope_scaling={"type": "linear", "factor": 4.0},
    ),
    "glm4-no-bias-quarter": case(
        "glm4", attention_bias=False, tie_word_embeddings=True, pad_token_id=0, **partial(0.25)
    ),
}
