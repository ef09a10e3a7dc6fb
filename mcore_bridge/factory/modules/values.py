"""Attention whose values differ from its keys: in their norms, in their width, or in that they have no projection.

In layers whose values are their keys, ``linear_qk`` takes the place of ``linear_qkv``, without rows of values.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron.core.tensor_parallel import all_gather_last_dim_from_tensor_parallel_region
from torch import Tensor, nn

from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.modules.backend import LayerContext, mixed, separate_norm
from mcore_bridge.factory.modules.torch_modules import UnitNorm

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


def adapt_values(layer: Any, context: LayerContext) -> None:
    """Norm the values of a layer, change their width, or take its keys for values, if its config asks for it.

    The attributes of the config are ``value_norm``, ``value_channels`` and ``keys_as_values``.
    """
    config, attention = context.config, layer.self_attention
    if getattr(config, "keys_as_values", False):
        separate_norm(layer, context)
        attention.module = mixed(KeysAsValues, attention.module)
    if getattr(config, "value_channels", None) is not None:
        attention.module = mixed(SizedValues, attention.module)
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


class OwnProjection(nn.Module):
    """Attention whose projection has ``value_width`` rows of values in each group, and not as many as of keys."""

    config: Any
    pg_collection: Any
    linear_qkv: Any
    world_size: int
    num_query_groups_per_partition: int
    hidden_size_per_attention_head: int
    q_layernorm: Any
    k_layernorm: Any
    value_width: int

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, ``[s, b, heads of this rank, dim]``, from the input ``[s, b, h]``.

        Values are the keys before their norm if they have no rows.
        """
        if output_gate or not split_qkv:
            raise ConfigError(
                "attention whose values are not as wide as its keys, or are its keys, needs "
                f"attention_output_gate=False and fused_single_qkv_rope=False, found {output_gate} and "
                f"{not split_qkv}: remove them"
            )
        mixed_qkv, _ = self.linear_qkv(hidden_states)
        dim, ranks_per_group = self.hidden_size_per_attention_head, self.world_size // self.config.num_query_groups
        if ranks_per_group > 1:  # ranks share a group, so each of them gathers the whole group
            mixed_qkv = all_gather_last_dim_from_tensor_parallel_region(mixed_qkv)
            mixed_qkv = mixed_qkv.chunk(self.config.num_query_groups, -1)[self._rank // ranks_per_group]
        groups = mixed_qkv.unflatten(-1, (self.num_query_groups_per_partition, -1))
        queries = groups.size(-1) - dim - self.value_width
        query, key, value = groups.split((queries, dim, self.value_width), -1)
        query = query.unflatten(-1, (-1, dim)).flatten(-3, -2)
        if ranks_per_group > 1:
            query = query.chunk(ranks_per_group, -2)[self._rank % ranks_per_group]
        return self._finished(query, key, value if self.value_width else key)

    def _finished(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys behind their norms, and values, from projected heads ``[s, b, heads of this rank, dim]``."""
        return _normed(query, self.q_layernorm), _normed(key, self.k_layernorm), value

    @property
    def _rank(self) -> int:
        rank: int = self.pg_collection.tp.rank()
        return rank


def _normed(heads: Tensor, norm: Any) -> Tensor:
    normed: Tensor = heads if norm is None else norm(heads)
    return normed


class KeysAsValues(OwnProjection):
    """Attention whose values are its keys before their norm."""

    value_width = 0

    def __init__(self, *places: Any, config: TransformerConfig, submodules: Any, **arguments: Any) -> None:
        super().__init__(*places, config=config, submodules=_narrowed(submodules, config, 0), **arguments)
        self.linear_qk: Any = self._modules.pop("linear_qkv")

    @property
    def linear_qkv(self) -> Any:
        """The projection, under its name in megatron-core's methods."""
        return self.linear_qk


class SizedValues(OwnProjection):
    """Attention whose values have another width than queries and keys, and are multiplied by a number."""

    def __init__(self, *places: Any, config: Any, submodules: Any, **arguments: Any) -> None:
        keys, values = config.kv_channels, config.value_channels
        fewer = config.num_attention_heads * (keys - values)
        own = replace(
            _narrowed(submodules, config, values),
            linear_proj=sized(submodules.linear_proj, inputs=-fewer),
            core_attention=functools.partial(submodules.core_attention, k_channels=keys, v_channels=values),
        )
        super().__init__(*places, config=config, submodules=own, **arguments)
        self.value_width = self.val_hidden_size = values

    def get_query_key_value_tensors(self, *inputs: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys ``[s, b, heads of this rank, dim]``, and values, whose dim is another."""
        query, key, value = super().get_query_key_value_tensors(*inputs, **options)
        return query, key, value * self.config.value_scale


def _narrowed(submodules: Any, config: TransformerConfig, width: int) -> Any:
    """``submodules`` of attention whose projection has ``width`` rows of values in each group."""
    fewer = (config.kv_channels - width) * config.num_query_groups
    return replace(submodules, linear_qkv=sized(submodules.linear_qkv, outputs=-fewer))


def sized(projection: type, *, inputs: int = 0, outputs: int = 0) -> type:
    """A class that makes a ``projection`` with so many more inputs and outputs than megatron-core asks for."""

    class Sized:
        """Makes a projection. The constructor returns an object of the class of the projection."""

        def __new__(cls, num_inputs: int, num_outputs: int, **arguments: Any) -> Any:
            return projection(num_inputs + inputs, num_outputs + outputs, **arguments)

    return Sized
