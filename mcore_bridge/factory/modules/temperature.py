"""A temperature of queries that grows with their position in the text, as in llama 4 and ministral3."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


def adapt_query_temperature(layer: Any, config: TransformerConfig) -> None:
    """Makes core attention multiply queries by a temperature, if the rope of the config has one."""
    rope = getattr(config, "hf_rope", None)
    if rope is not None and rope.query_temperature is not None:
        attention = layer.self_attention.submodules
        attention.core_attention = tempered(attention.core_attention)


@functools.cache
def tempered(core_attention: type) -> type:
    """A subclass of ``core_attention`` that multiplies queries by their temperature."""
    from megatron.core import parallel_state

    from mcore_bridge.factory.modules.torch_modules import places_in_sequences, places_in_text

    class TemperedAttention(core_attention):
        """Core attention of ``query * (1 + beta * log(1 + position // length))``."""

        def __init__(self, config: Any, *arguments: Any, pg_collection: Any = None, **keywords: Any) -> None:
            super().__init__(config, *arguments, pg_collection=pg_collection, **keywords)
            self.temperature = config.hf_rope.query_temperature
            group = parallel_state.get_context_parallel_group() if pg_collection is None else pg_collection.cp
            self.text_group = group

        def forward(
            self, query: Tensor, key: Tensor, *arguments: Any, packed_seq_params: Any = None, **keywords: Any
        ) -> Tensor:
            if packed_seq_params is None:
                places = places_in_text(query, key, self.text_group)
            else:
                places = places_in_sequences(packed_seq_params, self.text_group, query.device)
            query = query * temperature(places, *self.temperature).view(-1, *[1] * (query.dim() - 1)).to(query.dtype)
            output: Tensor = super().forward(query, key, *arguments, packed_seq_params=packed_seq_params, **keywords)
            return output

    return TemperedAttention


def temperature(places: Tensor, beta: float, length: float) -> Tensor:
    """The factor of queries at these positions, in fp32."""
    return 1 + beta * torch.log(1 + torch.floor(places / length))
