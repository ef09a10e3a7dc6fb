"""Blocks of RLinf's configs."""

from pathlib import Path

import yaml

BLOCKS = Path(__file__).parent.parent / "trainers" / "rlinf"


def block(name, **model):
    found = yaml.safe_load((BLOCKS / f"{name}.yaml").read_text())["actor"]
    found["model"] |= model
    return found


def filled_in(hf):
    """The keys that RLinf's ``validate_model_cfg_by_hf_config`` writes into the block."""
    got = hf.to_dict().get
    return {
        "padded_vocab_size": hf.vocab_size,
        "max_position_embeddings": hf.max_position_embeddings,
        "rotary_base": (got("rope_parameters") or {}).get("rope_theta", got("rope_theta")),
        "share_embeddings_and_output_weights": hf.tie_word_embeddings,
        "num_layers": hf.num_hidden_layers,
        "hidden_size": hf.hidden_size,
        "num_attention_heads": hf.num_attention_heads,
        "num_query_groups": hf.num_key_value_heads,
        "ffn_hidden_size": hf.intermediate_size,
        "attention_dropout": hf.attention_dropout,
        "hidden_dropout": 0.0,
        "add_qkv_bias": hf.model_type == "qwen2",
        "qk_layernorm": hf.model_type.startswith("qwen3") or None,
        "layernorm_epsilon": hf.rms_norm_eps,
        "head_dim": got("head_dim"),
        "kv_channels": got("head_dim"),
        "num_moe_experts": got("num_experts"),
        "num_experts": got("num_experts"),
        "moe_ffn_hidden_size": got("moe_intermediate_size"),
        "moe_router_topk": got("num_experts_per_tok") or 2,
        "rotary_percentage": 1.0,
        "make_vocab_size_divisible_by": 1,
        "seq_len_interpolation_factor": None,
        "add_position_embedding": False,
        "masked_softmax_fusion": True,
        "pipeline_model_parallel_split_rank": None,
        "virtual_pipeline_model_parallel_size": None,
        "trust_remote_code": True,
    }
