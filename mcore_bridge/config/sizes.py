"""Checks of the sizes of a model when a config is read, since torch's errors about sizes name no field."""

from collections.abc import Iterator, Mapping
from typing import TypeGuard

from mcore_bridge.errors import shown

LARGEST = 2**31 - 1
"""More than any dimension of a published tensor; products of several such sizes still have a meaning in 64 bits."""
SIZES = frozenset(
    {
        *("hidden_size", "ffn_hidden_size", "vocab_size", "hf_vocab_size", "num_layers", "kv_channels"),
        *("num_attention_heads", "num_query_groups", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "v_head_dim"),
        *("qk_pos_emb_head_dim", "num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size", "expert_latent_size"),
        *("moe_shared_expert_intermediate_size", "dsa_indexer_head_dim", "dsa_indexer_n_heads"),
        *("mamba_num_heads", "mamba_head_dim", "mamba_state_dim", "mamba_num_groups", "mamba_conv_kernel"),
        *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
        "linear_conv_kernel_dim",
    }
)
"""The mcore names that are sizes or counts. If a model has the name, it must be positive."""


def is_count(value: object) -> TypeGuard[int]:
    """Whether ``value`` is a whole number of at least 1. A ``bool`` is not a number here."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def size_problems(hf: Mapping[str, object], names: tuple[str, ...], mcore: Mapping[str, object]) -> Iterator[str]:
    """Faults of the sizes that one entry of a table has made from the HF fields ``names``."""
    for name in sorted(SIZES & mcore.keys()):
        value = mcore[name]
        if value is not None and not (is_count(value) and value <= LARGEST):
            fields = ", ".join(f"{field}={shown(hf[field])}" for field in names if field in hf)
            yield (
                f"{fields or name} must give a whole number from 1 to {LARGEST}, found {shown(value)} as "
                f"megatron-core's {name}. Correct the HF config."
            )
