"""Models with norms in other places."""

from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from tests.support import tiny
from tests.zoo.norms import HUNYUAN, WINDOWED, ropes
from tests.zoo.submodules import MULTIPLIERS


def config(model_type: str, **changes: Any) -> PretrainedConfig:
    """A config with two groups of keys, which four ranks share. It has no padding token, whose row gets no gradient."""
    runs = {"pad_token_id": None, "attn_implementation": "eager"}  # the default of transformers 4 drops soft caps
    sizes = {**tiny.DISTINCT, **tiny.COMMON, "num_key_value_heads": 2, **runs}
    if "layer_norm_eps" in changes or model_type == "olmo":
        del sizes["rms_norm_eps"]
    return AutoConfig.for_model(model_type, **{**sizes, **changes})


CAPPED = {"query_pre_attn_scalar": 20, "attn_logit_softcapping": 0.7, "final_logit_softcapping": 2.0}


CASES = {
    "olmo2": config("olmo2", attention_bias=True),
    "olmo3, tied": config(
        "olmo3", tie_word_embeddings=True, **WINDOWED, **ropes({"rope_type": "default"}, sliding_base=50000.0)
    ),
    "gemma2": config("gemma2", **WINDOWED, **CAPPED, attention_bias=True, tie_word_embeddings=True),
    "gemma3": config("gemma3_text", **WINDOWED, **ropes({"rope_type": "linear", "factor": 4.0})),
    "hunyuan": config("hunyuan_v1_dense", attention_bias=True, rope_scaling=HUNYUAN),
    "cohere": config("cohere", use_qk_norm=True, hidden_size=112, layer_norm_eps=1e-3, logit_scale=0.3),
    "granite": config("granite", **MULTIPLIERS, attention_bias=True, mlp_bias=True),
    "phi": config("phi", hidden_size=128, head_dim=16, qk_layernorm=True, layer_norm_eps=1e-3),
    "olmo": config("olmo", clip_qkv=0.05, attention_bias=True),
    **({"nanochat": config("nanochat", final_logit_softcapping=2.0)} if "nanochat" in CONFIG_MAPPING else {}),
    "glm4": config("glm4", tie_word_embeddings=True, head_dim=16),
}
