"""Queries that are scaled by a temperature, which grows with the position in the text, as in ministral3 and llama 4."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mcore_bridge.factory.modules.backend import LayerContext, is_unrotated

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


@dataclass(frozen=True, slots=True)
class Temperature:
    """The factor of a query at a position: ``1 + beta * log(1 + (position + first) // length)``.

    ``rounded`` factors have the dtype of queries before they are multiplied, as transformers does in some families.
    ``smooth`` factors are ``1 + beta * log((position + first) / length)``, and 1 up to this length.
    """

    beta: float
    length: float
    first: int = 0
    rounded: bool = True
    smooth: bool = False

    def __call__(self, places: Tensor) -> Tensor:
        """The factors at these positions, in fp32."""
        lengths = (places + self.first) / self.length
        return 1 + self.beta * torch.log(lengths.clamp(min=1) if self.smooth else 1 + torch.floor(lengths))


def temperature_of(config: TransformerConfig, number: int) -> Temperature | None:
    """The temperature of layer ``number`` (from 0): from the rope, of this layer, or for layers without a rope."""
    own = getattr(config, "query_growth", None)
    if own is not None:
        beta, length = own
        return Temperature(beta, length, first=1, rounded=False, smooth=True)
    rope, unrotated = getattr(config, "hf_rope", None), getattr(config, "nope_temperature", None)
    if rope is not None and rope.query_temperature is not None:
        return Temperature(*rope.query_temperature)
    if unrotated is None or not is_unrotated(config, number):
        return None
    beta, length = unrotated
    return Temperature(beta, length, first=1, rounded=False)


def adapt_query_temperature(layer: Any, context: LayerContext) -> None:
    """Makes the core attention of a layer multiply queries by a temperature, if the layer has one."""
    if temperature_of(context.config, context.number) is None:
        return
    attention = layer.self_attention.submodules
    attention.core_attention = tempered(attention.core_attention)


@functools.cache
def tempered(core_attention: type) -> type:
    """A subclass of ``core_attention`` that multiplies queries by their temperature."""
    from megatron.core import parallel_state

    from mcore_bridge.factory.modules.torch_modules import first_tokens, places_in_sequences, places_in_text

    class TemperedAttention(core_attention):
        """Core attention of queries that are multiplied by their ``Temperature``."""

        def __init__(
            self, config: Any, layer_number: int, *arguments: Any, pg_collection: Any = None, **keywords: Any
        ) -> None:
            super().__init__(config, layer_number, *arguments, pg_collection=pg_collection, **keywords)
            self.temperature = temperature_of(config, layer_number - 1) or Temperature(0.0, 1.0)
            group = parallel_state.get_context_parallel_group() if pg_collection is None else pg_collection.cp
            self.text_group = group

        def forward(
            self,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | None = None,
            *arguments: Any,
            packed_seq_params: Any = None,
            **keywords: Any,
        ) -> Tensor:
            if packed_seq_params is not None:
                places = places_in_sequences(packed_seq_params, self.text_group, query.device)[:, None, None]
            else:
                places = places_in_text(query, key, self.text_group)[:, None, None, None]
                if attention_mask is not None and attention_mask.dim() == 2:
                    first = first_tokens(attention_mask, self.text_group)
                    places = (places - first[:, None, None]).clamp(min=0)
            factor = self.temperature(places)
            query = (query * (factor.to(query.dtype) if self.temperature.rounded else factor)).to(query.dtype)
            options = {"packed_seq_params": packed_seq_params, **keywords}
            output: Tensor = super().forward(query, key, value, attention_mask, *arguments, **options)
            return output

    return TemperedAttention
