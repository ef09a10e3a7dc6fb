"""Scores of attention by distance: learned profiles of scores over the distance to a key, which each query mixes.

A projection gives each query the weights of the profiles. They travel behind the dims of the query, so megatron-core
recomputes and packs them like queries, and a temperature of queries scales both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from torch import Tensor, nn

from mcore_bridge.factory.modules.attention_gate import projection_beside
from mcore_bridge.factory.modules.backend import Backend, mixed, say
from mcore_bridge.factory.modules.scores import ScoresCoreAttention
from mcore_bridge.factory.modules.torch_modules import placement

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


def adapt_relative(layer: Any, config: TransformerConfig, backend: Backend) -> None:
    """Add scores by distance to the attention of a layer, if ``config.relative_profiles`` is set.

    Args:
        layer: the submodules of the layer, changed in place.
        config: its ``relative_profiles`` is their number, and ``relative_extent`` how many distances they have.
        backend: the backend of the layer's modules.
    """
    if getattr(config, "relative_profiles", None) is None:
        return
    if backend == "te":
        say("TransformerEngine has no attention with learned scores by distance: these layers use torch's")
    attention = layer.self_attention
    attention.submodules.core_attention = RelativeCoreAttention
    attention.module = mixed(RelativeQueries, attention.module)
    attention.params = {**(attention.params or {}), "beside": projection_beside(layer, config, backend)}


class RelativeQueries(nn.Module):
    """Attention whose queries have the weights of profiles behind their own dims."""

    def __init__(self, *places: Any, config: Any, beside: Any, **arguments: Any) -> None:
        super().__init__(*places, config=config, **arguments)
        self.profiles = config.relative_profiles
        self.linear_relative = beside(
            config.num_attention_heads * self.profiles, config, tp_group=arguments["pg_collection"].tp
        )

    def get_query_key_value_tensors(self, hidden_states: Tensor, *inputs: Any, **options: Any) -> Any:
        """Queries with their weights ``[s, b, heads of this rank, dim + profiles]``, keys, and values."""
        attention: Any = super()
        query, key, value = attention.get_query_key_value_tensors(hidden_states, *inputs, **options)
        weights, _ = self.linear_relative(hidden_states)
        return torch.cat((query, weights.unflatten(-1, (-1, self.profiles))), -1), key, value


class RelativeCoreAttention(ScoresCoreAttention):
    """``ScoresCoreAttention`` with scores by distance: 0 for keys that are ``relative_extent`` tokens away or more."""

    def __init__(self, config: Any, *places: Any, **arguments: Any) -> None:
        super().__init__(config, *places, **arguments)
        self.extent = config.relative_extent
        self.profiles = nn.Parameter(torch.empty(config.relative_profiles, self.extent, **placement(config)))
        if config.perform_initialization:
            config.init_method(self.profiles)

    def _scores(self, query: Tensor, key: Tensor, places: Tensor) -> Tensor:
        query, weights = query.split((key.size(-1), query.size(-1) - key.size(-1)), -1)
        # ranks have different heads, so the backward sums the gradients of the profiles
        by_distance = weights @ copy_to_tensor_model_parallel_region(self.profiles)
        distance = places[:, None] - torch.arange(key.size(-2), device=places.device)
        index = distance.clamp(0, self.extent - 1).expand(*by_distance.shape[:2], -1, -1)
        outside = (distance < 0) | (distance >= self.extent)
        return super()._scores(query, key, places) + by_distance.gather(-1, index).masked_fill(outside, 0.0)
