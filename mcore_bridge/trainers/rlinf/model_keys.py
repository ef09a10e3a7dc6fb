"""The keys of RLinf's ``actor.model`` block, in all spellings: their translation, or why they have no effect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import gelu, relu, silu

from mcore_bridge.config.mesh.parallel_dims import ParallelDims
from mcore_bridge.errors import ConfigError

MESH = frozenset(ParallelDims().to_config_fields())
"""Keys of the mesh, with megatron-core's names."""

KERNELS = frozenset(
    (
        *("apply_rope_fusion", "bias_dropout_fusion", "bias_activation_fusion", "gradient_accumulation_fusion"),
        *("moe_permute_fusion", "persist_layer_norm"),
    )
)
"""Keys for faster kernels with equal results. They are used only with TransformerEngine."""

SPELLED = {
    "head_dim": "kv_channels",
    "num_experts": "num_moe_experts",
    "max_position_embeddings": "max_sequence_length",
    "rotary_percentage": "rotary_percent",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
}
"""Keys that have another name in megatron-core."""

FROM_HF = frozenset(
    (
        *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
        *("max_sequence_length", "rotary_base", "rotary_percent", "share_embeddings_and_output_weights"),
        *("attention_dropout", "add_qkv_bias", "qk_layernorm", "layernorm_epsilon"),
        *("num_moe_experts", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_topk_scaling_factor"),
        *("multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
        "moe_shared_expert_intermediate_size",
    )
)
"""Keys that RLinf fills in from the HF config, for every model, even for one without such a field."""

IGNORED = {
    "megatron_checkpoint": "it is the folder of weights and HF config: Megatron loads it after the model is built",
    "model_path": "it is the folder of the HF config",
    "seq_length": "batches decide it",
    "encoder_seq_length": "batches decide it",
    "make_vocab_size_divisible_by": "a vocabulary is padded to a multiple of tensor_model_parallel_size",
    "moe_grouped_gemm": "the backend decides it: grouped with TransformerEngine, one by one without",
    "seq_len_interpolation_factor": "the rope is computed from the HF config as in transformers",
    "first_k_dense_replace": "the HF config says which layers have experts",
    "add_position_embedding": "position_embedding_type decides it",
    "pipeline_model_parallel_split_rank": "there is no encoder",
    "trust_remote_code": "configs are read without running code of a repository",
    "use_cpu_initialization": "parameters are made on the device of the model",
}
"""Keys without effect, with the reason."""

MODEL_TYPES = {
    "qwen2.5": ("qwen2",),
    "qwen3": ("qwen3",),
    "qwen3_moe": ("qwen3_moe",),
    "deepseek_v3": ("deepseek_v3", "kimi_k2"),
    "glm4_moe_lite": ("glm4_moe_lite",),
}
"""The possible ``model_type`` values of HF for each of RLinf's names."""

_DTYPES = {
    torch.bfloat16: ("bf16", "bf16-mixed"),
    torch.float16: (16, "16", "fp16", "16-mixed"),
    torch.float32: (32, "32", "fp32", "32-true"),
}
_ACTIVATIONS = {"swiglu": silu, "geglu": gelu, "reglu": relu, "gelu": gelu}
_NORMALIZATIONS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm", "layernorm1p": "LayerNorm"}


def dtype_of(precision: object) -> torch.dtype:
    """The dtype for ``precision`` in any of its spellings.

    Raises:
        ConfigError: there is no such spelling.
    """
    for dtype, spellings in _DTYPES.items():
        if precision in spellings:
            return dtype
    known = [spelling for spellings in _DTYPES.values() for spelling in spellings]
    raise ConfigError(f"precision must be one of {known}, found {precision!r}")


def to_mcore(model: Mapping[str, Any]) -> dict[str, Any]:
    """Translate keys to megatron-core's fields, except keys of the mesh and ignored ones.

    Raises:
        ConfigError: an activation or a normalization is unknown.
    """
    fields: dict[str, Any] = {}
    for key, value in model.items():
        if key == "activation":
            name = _known(key, str(value).removeprefix("fast-"), {*_ACTIVATIONS, "squared-relu"})
            fields["gated_linear_unit"] = name.endswith("glu")
            fields["activation_func"] = _ACTIVATIONS.get(name) or _squared_relu()
        elif key == "normalization":
            name = _known(key, str(value).lower(), _NORMALIZATIONS.keys())
            fields |= {key: _NORMALIZATIONS[name], "layernorm_zero_centered_gamma": name == "layernorm1p"}
        elif key not in MESH and key not in IGNORED:
            fields[SPELLED.get(key, key)] = value
    return fields


def _known(key: str, value: str, known: Any) -> str:
    if value not in known:
        raise ConfigError(f"{key} must be one of {sorted(known)}, found {value!r}")
    return value


def _squared_relu() -> Any:
    from megatron.core.activations import squared_relu

    return squared_relu
