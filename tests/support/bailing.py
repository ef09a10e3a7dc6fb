"""Ling 2.0, which transformers lacks: published configs, and checkpoints of a glm4_moe with renamed tensors.

Both families compute equal logits, with one exception. If all biased scores of a group are below zero, glm4_moe prefers
experts that it left out, whose score is 0. So the biases of these checkpoints are not negative.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests import zoo
from tests.support.strategies import random_state
from tests.zoo.plain import partial

PUBLISHED: dict[str, Any] = {
    "architectures": ["BailingMoeV2ForCausalLM"],
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_bailing_moe_v2.BailingMoeV2Config"},
    "embedding_dropout": 0.0,
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5120,
    "max_position_embeddings": 32768,
    "max_window_layers": 20,
    "model_type": "bailing_moe",
    "moe_intermediate_size": 512,
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 512,
    "n_group": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 20,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "output_dropout": 0.0,
    "output_router_logits": False,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 600000,
    "routed_scaling_factor": 2.5,
    "router_dtype": "fp32",
    "score_function": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "torch_dtype": "bfloat16",
    "use_bias": False,
    "use_cache": True,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "use_rmsnorm": True,
    "vocab_size": 157184,
}
"""The fields of the config.json of Ling mini 2.0."""
_SIZES: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "head_dim": 24,
    "hidden_size": 48,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "num_attention_heads": 8,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
    "topk_group": 2,
    "vocab_size": 97,
}
_GROUPED: dict[str, Any] = {**PUBLISHED, **_SIZES, "num_experts": 8, "num_shared_experts": 2}
_OTHERWISE: dict[str, Any] = {
    "first_k_dense_replace": 2,
    "n_group": 1,
    "num_experts_per_tok": 3,
    "num_shared_experts": 1,
    "partial_rotary_factor": 0.25,
    "tie_word_embeddings": True,
    "topk_group": 1,
    "use_qk_norm": False,
    "use_qkv_bias": True,
}
TINY = {"grouped": _GROUPED, "one group": {**_GROUPED, **_OTHERWISE}}
"""Small models: groups and norms of queries and keys, or neither, but biases and a tied head."""
_SAME = (
    *_SIZES.keys() - {"rope_theta", "max_position_embeddings"},
    *("attention_dropout", "hidden_act", "initializer_range", "norm_topk_prob", "use_qk_norm"),
)
_UNNAMED = (
    (r"^model\.word_embeddings\.", "model.embed_tokens."),
    (r"\.attention\.dense\.", ".self_attn.o_proj."),
    (r"\.attention\.(query|key)_layernorm\.", lambda match: f".self_attn.{match[1][0]}_norm."),
    (r"\.gate\.expert_bias$", ".gate.e_score_correction_bias"),
)
_NAMES = (
    (r"^model\.embed_tokens\.", "model.word_embeddings."),
    (r"\.self_attn\.o_proj\.", ".attention.dense."),
    (r"\.self_attn\.(q|k)_norm\.", lambda match: f".attention.{'query' if match[1] == 'q' else 'key'}_layernorm."),
    (r"\.gate\.e_score_correction_bias$", ".gate.expert_bias"),
)


def twin(fields: dict[str, Any]) -> Any:
    """The config of an equivalent model of transformers."""
    same = {name: fields[name] for name in _SAME}
    return zoo.case(
        "glm4_moe",
        **{**same, **partial(fields["partial_rotary_factor"]), "attention_bias": fields["use_qkv_bias"]},
        n_routed_experts=fields["num_experts"],
        n_shared_experts=fields["num_shared_experts"],
    ).hf


def twin_state(fields: dict[str, Any]) -> dict[str, Tensor]:
    """The checkpoint of the equivalent family."""
    state = random_state(twin(fields))
    return {name: tensor.abs() if name.endswith("correction_bias") else tensor for name, tensor in state.items()}


def renamed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The equivalent family's tensors under Ling's names: q, k and v in one tensor, one after another."""
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if match := re.fullmatch(r"(.*)\.self_attn\.(q|k|v)_proj\.(weight|bias)", name):
            parts = [state[f"{match[1]}.self_attn.{each}_proj.{match[3]}"] for each in "qkv"]
            found[f"{match[1]}.attention.query_key_value.{match[3]}"] = torch.cat(parts)
            continue
        for pattern, replacement in _NAMES:
            name = re.sub(pattern, replacement, name)
        found[name] = tensor
    return found


def unnamed(state: dict[str, Tensor], hf: Any) -> dict[str, Tensor]:
    """The tensors of a model of this config under the equivalent family's names."""
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if match := re.fullmatch(r"(.*)\.attention\.query_key_value\.(weight|bias)", name):
            rows = [heads * hf.head_dim for heads in (hf.num_attention_heads, *[hf.num_key_value_heads] * 2)]
            for each, part in zip("qkv", tensor.split(rows), strict=True):
                found[f"{match[1]}.self_attn.{each}_proj.{match[2]}"] = part.clone()
            continue
        for pattern, replacement in _UNNAMED:
            name = re.sub(pattern, replacement, name)
        found[name] = tensor
    return found


def write(folder: Path, fields: dict[str, Any], state: dict[str, Tensor]) -> Path:
    """A checkpoint of Ling."""
    from safetensors.torch import save_file

    (folder / "config.json").write_text(json.dumps(fields))
    save_file(renamed(state), folder / "model.safetensors", metadata={"format": "pt"})
    return folder
