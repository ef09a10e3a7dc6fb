"""Layers that read the keys and values of an earlier layer of their stage, and project queries alone.

They read keys before the rope, and rotate them again: layers of one kind have one rope. So keys and values are inputs
of core attention, which may be recomputed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor, nn

from mcore_bridge.factory.modules.backend import LayerContext, free_after_forward, mixed, separate_norm
from mcore_bridge.factory.modules.values import sized

if TYPE_CHECKING:
    from collections.abc import Mapping

    from megatron.core.models.gpt import GPTModel


def adapt_shared_keys(layer: Any, context: LayerContext) -> None:
    """Let a layer keep its keys and values for later layers, or read the keys and values of another layer.

    ``keys_of_layer`` of its config is the number (from 0) of the layer whose keys and values are read, if any are.
    """
    source, attention = getattr(context.config, "keys_of_layer", None), layer.self_attention
    if source is None:
        return
    if source != context.number:
        separate_norm(layer, context)
    attention.module = mixed(KeepsKeys if source == context.number else ReadsKeys, attention.module)


def join_shared_keys(chunk: GPTModel) -> None:
    """Give each layer that reads keys the layer that keeps them, and drop what was kept after each forward."""
    layers: Any = chunk.decoder.layers
    attentions: dict[int, Any] = {layer.layer_number - 1: layer.self_attention for layer in layers}
    keeping = [attention for attention in attentions.values() if isinstance(attention, KeepsKeys)]
    for attention in attentions.values():
        if isinstance(attention, ReadsKeys):
            attention.reads(attentions)
    free_after_forward(chunk.decoder, keeping, kept=None)


class KeepsKeys(nn.Module):
    """Attention whose keys and values later layers read."""

    kept: tuple[Tensor, Tensor] | None = None

    def get_query_key_value_tensors(self, *inputs: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, ``[s, b, heads of this rank, dim]``."""
        attention: Any = super()
        query, key, value = attention.get_query_key_value_tensors(*inputs, **options)
        self.kept = key, value
        return query, key, value


class ReadsKeys(nn.Module):
    """Attention with the keys and values of another layer."""

    config: Any
    hidden_size_per_attention_head: int
    q_layernorm: Any
    source: Any

    def __init__(self, *places: Any, config: Any, submodules: Any, **arguments: Any) -> None:
        rows = 2 * config.kv_channels * config.num_query_groups
        own = replace(submodules, linear_qkv=sized(submodules.linear_qkv, outputs=-rows), k_layernorm=IdentityOp)
        super().__init__(*places, config=config, submodules=own, **arguments)
        self.linear_q_proj: Any = self._modules.pop("linear_qkv")

    def reads(self, attentions: Mapping[int, Any]) -> None:
        """Find the attention whose keys are read among the attentions of layers. It is no submodule of this one."""
        self.__dict__["source"] = attentions[self.config.keys_of_layer]

    @property
    def linear_qkv(self) -> Any:
        """The projection, under its name in megatron-core's methods."""
        return self.linear_q_proj

    def get_query_key_value_tensors(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of this layer, and keys and values of the other, ``[s, b, heads of this rank, dim]``."""
        flat, _ = self.linear_q_proj(hidden_states)
        query = flat.unflatten(-1, (-1, self.hidden_size_per_attention_head))
        key, value = self.source.kept
        return self.q_layernorm(query), key, value
