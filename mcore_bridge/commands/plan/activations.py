"""Estimates the activations that one token keeps for the backward pass, from a ``TransformerConfig``.

The numbers count elements of the parameters' dtype. Two things are assumed: flash attention, which keeps no scores, and
no dropout, as in RL trainers. ``benchmarks/memory.py`` compares these numbers with the memory that a GPU allocates, and
``tests/commands/test_suggest.py`` compares them with the tensors that autograd keeps on a CPU.
"""

from __future__ import annotations

from typing import Any

from mcore_bridge.config.layer_kinds import SECOND, layer_config, layers_but_full, layers_of

_ROUTER = 4  # elements per expert: logits and probabilities in fp32
_LOGITS = 3  # elements per entry of the vocabulary: their softmax in fp32, and its gradient


def kept_by_layers(config: Any) -> list[int]:
    """Elements that each decoder layer keeps for one token, over all ranks of its tensor parallel group.

    Args:
        config: a ``TransformerConfig``.
    """
    sparse = layers_of(vars(config)) if config.num_moe_experts else [0] * config.num_layers
    linear = layers_but_full(vars(config), "linear_attention_freq", unset=0)
    own = [layer_config(config, layer) for layer in range(config.num_layers)]
    attentions = [
        _linear_attention(config) if is_linear else _attention(own[layer]) for layer, is_linear in enumerate(linear)
    ]
    mlps = [_experts(own[layer]) if is_sparse else _mlp(own[layer]) for layer, is_sparse in enumerate(sparse)]
    kinds = getattr(config, "layer_kinds", None)
    if kinds is not None:  # mixers, and layers of one half
        attentions = [_mixer(config, kind) + _attention(config) * ("*" in kind) for kind in kinds]
        mlps = [0 if SECOND.isdisjoint(kind) else mlp for kind, mlp in zip(kinds, mlps, strict=True)]
    return [attention + mlp for attention, mlp in zip(attentions, mlps, strict=True)]


def kept_by_recomputation(config: Any) -> int:
    """Elements that a layer keeps for one token if all else is computed again: its input."""
    return int(config.hidden_size)


def kept_by_output(config: Any, vocabulary: int) -> int:
    """Elements that the final norm, the output layer and the loss keep for one token."""
    return 2 * config.hidden_size + _LOGITS * vocabulary


def _attention(config: Any) -> int:
    """The input, the norm, the fused projection, norms of queries and keys, their rotation, the output, its sum."""
    queries = config.kv_channels * config.num_attention_heads
    keys = config.kv_channels * config.num_query_groups
    of_value = getattr(config, "value_channels", None) or config.kv_channels
    values, attended = of_value * config.num_query_groups, of_value * config.num_attention_heads
    by_own = {None: 0, "head": config.num_attention_heads, "element": queries}[getattr(config, "attention_gate", None)]
    if config.multi_latent_attention:
        return _latent_attention(config) + 2 * by_own
    gate = by_own or queries * bool(getattr(config, "attention_output_gate", False))
    num_rotated = 2 if config.qk_layernorm else 1
    turned = (1 + num_rotated) * (queries + keys)
    return int(3 * config.hidden_size + turned + values + attended + 2 * gate)


def _latent_attention(config: Any) -> int:
    heads, query = config.num_attention_heads, config.qk_head_dim + config.qk_pos_emb_head_dim
    latents = 2 * (config.q_lora_rank or 0) + 2 * config.kv_lora_rank + config.qk_pos_emb_head_dim
    keys = heads * (config.qk_head_dim + config.v_head_dim)
    return int(3 * config.hidden_size + latents + keys + heads * (4 * query + config.v_head_dim))


def _linear_attention(config: Any) -> int:
    """The gated delta rule: input and output of the convolution, the gate, and the output before and after the gate."""
    values = config.linear_num_value_heads * config.linear_value_head_dim
    qkv = 2 * config.linear_num_key_heads * config.linear_key_head_dim + values
    return int(3 * config.hidden_size + 2 * qkv + 3 * values)


def _mixer(config: Any, kind: str) -> int:
    return sum(kept(config) for letter, kept in _MIXERS.items() if letter in kind)


def _short_convolution(config: Any) -> int:
    """The input, the norm and the sum, B, C and x, their products, and the convolved."""
    return 9 * int(config.hidden_size)


def _kda(config: Any) -> int:
    """Kimi delta attention: as the gated delta rule, with decays and gates of all channels, and their narrow inputs."""
    heads, dim = config.linear_num_key_heads, config.linear_key_head_dim
    return int(3 * config.hidden_size + 13 * heads * dim + 2 * dim * (not config.kda_full_rank))


def _mamba(config: Any) -> int:
    """A Mamba-2 mixer: input and output of the convolution, the gate, and the output before and after the gate."""
    inner = config.mamba_num_heads * config.mamba_head_dim
    convolved = inner + 2 * config.mamba_num_groups * config.mamba_state_dim
    return int(3 * config.hidden_size + 2 * convolved + 3 * inner)


_MIXERS = {"M": _mamba, "C": _short_convolution, "K": _kda}
"""What mixers keep, by their letters in ``layer_kinds``."""


def _mlp(config: Any) -> int:
    return int(3 * config.hidden_size + _activated(config, config.ffn_hidden_size))


def _experts(config: Any) -> int:
    """Tokens are assumed to be spread evenly over all experts."""
    routed = config.moe_router_topk * (config.hidden_size + _activated(config, config.moe_ffn_hidden_size))
    shared = _activated(config, config.moe_shared_expert_intermediate_size or 0)
    return int(3 * config.hidden_size + routed + shared + _ROUTER * config.num_moe_experts)


def _activated(config: Any, size: int) -> int:
    """Elements around the activation function: its input and output; with a gate, also the gate and the product."""
    return size * (2 + 2 * config.gated_linear_unit)
