"""Small configs of every dense family, as the JSON of a checkpoint, in either spelling of rope and dtype."""

import json
from pathlib import Path

from transformers import PretrainedConfig

from mcore_bridge.architecture import architecture_of
from mcore_bridge.config.fields import Field, Ignore
from mcore_bridge.config.hf import read_config
from mcore_bridge.config.rope import Rope, rope_from
from mcore_bridge.config.transformer import to_gpt_arguments, to_transformer_config

Json = dict[str, object]

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPES: dict[str, Json] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0, "truncate": False},
}
_COMMON: Json = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "initializer_range": 0.03,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": True,
}
_WINDOWS: Json = {
    "use_sliding_window": True,
    "sliding_window": 8,
    "max_window_layers": 1,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"],
}
_OWN: dict[str, Json] = {
    "llama": {"attention_bias": True, "mlp_bias": False},
    "mistral": {"sliding_window": 8},
    "qwen2": _WINDOWS,
    "qwen3": {**_WINDOWS, "attention_bias": True},
}


def spelling_4(rope_type: str, theta: float = 5e5, dtype: str = "bfloat16") -> Json:
    """Rope and dtype as transformers 4.57 and older write them."""
    scaling = None if rope_type == "default" else {"rope_type": rope_type, **ROPES[rope_type]}
    return {"rope_theta": theta, "rope_scaling": scaling, "torch_dtype": dtype}


def spelling_5(rope_type: str, theta: float = 5e5, dtype: str = "bfloat16") -> Json:
    """Rope and dtype as transformers 5 writes them."""
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": theta, **ROPES[rope_type]}, "dtype": dtype}


def family(model_type: str, rope_type: str = "llama3") -> Json:
    """A config of ``model_type`` in which no relevant field has transformers' default."""
    return {"model_type": model_type, **_COMMON, **_OWN[model_type], **spelling_4(rope_type)}


def write(folder: Path, fields: Json) -> Path:
    """``fields`` as the config.json of ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


NOT_COMPARABLE = ("init_method", "output_layer_init_method", "embedding_init_method")  # new closures in each config


def read(fields: Json, folder: Path) -> PretrainedConfig:
    return read_config(write(folder, fields))


def table_of(hf: PretrainedConfig) -> tuple[Field, ...]:
    return architecture_of(hf).fields


def built(hf: PretrainedConfig, table: tuple[Field, ...] | None = None) -> dict[str, object]:
    """All values that the table decides: config fields and attributes, ``GPTModel`` arguments, frequencies."""
    table = table or table_of(hf)
    config = to_transformer_config(hf, table)
    fields = {name: repr(value) for name, value in vars(config).items() if name not in NOT_COMPARABLE}
    rope = getattr(config, "hf_rope", None)
    return {**fields, **to_gpt_arguments(hf, table), "frequencies": rope and rope.frequencies(1000).tolist()}


def ignored_by(table: tuple[Field, ...]) -> set[str]:
    return {name for field in table if isinstance(field, Ignore) for name in field.names}


def rope_of(hf: PretrainedConfig, **overrides: object) -> Rope:
    """The rope of a config, with overrides of megatron-core's arguments for it."""
    return rope_from(hf.to_dict()).overridden(overrides)
