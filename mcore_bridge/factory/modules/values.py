"""Attention with norms of values, and attention whose values are its keys.

In layers whose values are their keys, ``linear_qk`` takes the place of ``linear_qkv``, without rows of values.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron.core.tensor_parallel import all_gather_last_dim_from_tensor_parallel_region
from torch import Tensor, nn

from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.modules.backend import Backend, mixed, norm_of
from mcore_bridge.factory.modules.norms import UnitNorm

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


def adapt_values(layer: Any, config: TransformerConfig, backend: Backend) -> None:
    """Norm the values of a layer, and take its keys for values, if its config asks for it.

    Args:
        layer: the submodules of the layer, changed in place.
        config: the config of the layer, with ``value_norm`` and ``keys_as_values``.
        backend: the backend of the layer's modules.
    """
    attention = layer.self_attention
    if getattr(config, "keys_as_values", False):
        if backend == "te":  # no name of a fused norm is known for another projection
            from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

            attention.submodules.linear_qkv = TEColumnParallelLinear
            layer.input_layernorm = norm_of(backend, config)
        attention.module = mixed(KeysAsValues, attention.module)
    if getattr(config, "value_norm", False):
        attention.module = mixed(NormedValues, attention.module)


class NormedValues(nn.Module):
    """Attention with a norm without weights in each head of its values."""

    config: Any

    def __init__(self, *places: Any, config: TransformerConfig, **arguments: Any) -> None:
        super().__init__(*places, config=config, **arguments)
        self.v_layernorm = UnitNorm(config, config.kv_channels, eps=config.layernorm_epsilon)

    def get_query_key_value_tensors(self, *inputs: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, ``[s, b, heads of this rank, dim]``."""
        attention: Any = super()
        query, key, value = attention.get_query_key_value_tensors(*inputs, **options)
        return query, key, self.v_layernorm(value)


class KeysAsValues(nn.Module):
    """Attention whose values are its keys before their norm."""

    config: Any
    pg_collection: Any
    world_size: int
    num_query_groups_per_partition: int
    hidden_size_per_attention_head: int
    q_layernorm: nn.Module
    k_layernorm: nn.Module

    def __init__(self, *places: Any, config: TransformerConfig, submodules: Any, **arguments: Any) -> None:
        super().__init__(*places, config=config, submodules=_narrowed(submodules, config), **arguments)
        self.linear_qk: Any = self._modules.pop("linear_qkv")

    @property
    def linear_qkv(self) -> Any:
        """The projection, under its name in megatron-core's methods."""
        return self.linear_qk

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, ``[s, b, heads of this rank, dim]``, from the input ``[s, b, h]``."""
        if output_gate or not split_qkv:
            raise ConfigError(
                "attention whose values are its keys needs attention_output_gate=False and "
                f"fused_single_qkv_rope=False, found {output_gate} and {not split_qkv}: remove them"
            )
        mixed_qk, _ = self.linear_qk(hidden_states)
        dim, ranks_per_group = self.hidden_size_per_attention_head, self.world_size // self.config.num_query_groups
        if ranks_per_group > 1:  # ranks share a group, so each of them gathers the whole group
            mixed_qk = all_gather_last_dim_from_tensor_parallel_region(mixed_qk)
            mixed_qk = mixed_qk.chunk(self.config.num_query_groups, -1)[self._rank // ranks_per_group]
        groups = mixed_qk.unflatten(-1, (self.num_query_groups_per_partition, -1, dim))
        query, key = groups[..., :-1, :].flatten(-3, -2), groups[..., -1, :]
        if ranks_per_group > 1:
            query = query.chunk(ranks_per_group, -2)[self._rank % ranks_per_group]
        return self.q_layernorm(query), self.k_layernorm(key), key

    @property
    def _rank(self) -> int:
        rank: int = self.pg_collection.tp.rank()
        return rank


def _narrowed(submodules: Any, config: TransformerConfig) -> Any:
    """``submodules`` of attention with a projection that has no rows of values."""
    projection, rows = submodules.linear_qkv, config.kv_channels * config.num_query_groups

    def without_values(inputs: int, outputs: int, **arguments: Any) -> nn.Module:
        module: nn.Module = projection(inputs, outputs - rows, **arguments)
        return module

    return replace(submodules, linear_qkv=without_values)
