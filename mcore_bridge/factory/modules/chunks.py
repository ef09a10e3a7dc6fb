"""Attention within chunks, as in Llama 4: a token attends to the earlier tokens of its chunk.

No kernel supports chunks. But attention can treat the chunks of a text as separate texts. A text that is one chunk long
needs no change.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mcore_bridge.factory.modules.backend import LayerContext, say
from mcore_bridge.factory.modules.torch_modules import CoreAttention, first_tokens, padding_hidden, places_in_text

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


def adapt_chunks(layer: Any, context: LayerContext) -> None:
    """Make a layer attend within chunks, if ``attention_chunks`` of its config has a length above 0 for it."""
    chunks = getattr(context.config, "attention_chunks", None)
    if not chunks or not chunks[context.number]:
        return
    attention = layer.self_attention.submodules
    if issubclass(attention.core_attention, CoreAttention):
        attention.core_attention = ChunkedAttention
    else:
        say("TransformerEngine has no attention within chunks: sequences that are longer than one chunk use torch's")
        attention.core_attention = chunked(attention.core_attention)


class ChunkedAttention(CoreAttention):
    """``CoreAttention`` within chunks, which are counted from the first token of each sequence."""

    def __init__(self, config: TransformerConfig, layer_number: int, *places: Any, **arguments: Any) -> None:
        super().__init__(config, layer_number, *places, **arguments)
        self.chunk: int = config.attention_chunks[layer_number - 1]

    def _sequence(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any,
        visible: Tensor | None = None,
    ) -> Tensor:
        attend = super()._sequence
        num_keys = key.size(0) * self.cp_group.size()
        if num_keys <= self.chunk or visible is not None:
            return attend(query, key, value, attention_mask, attn_mask_type, visible)
        if attention_mask is None and query.size(0) == num_keys:  # without a mask in memory
            parts = zip(*(tensor.split(self.chunk) for tensor in (query, key, value)), strict=True)
            return torch.cat([attend(q, k, v, None, attn_mask_type) for q, k, v in parts])
        places = places_in_text(query, key, self.cp_group)
        keys = torch.arange(num_keys, device=query.device)
        first = keys.new_zeros(1)
        if attention_mask is not None and attention_mask.dim() == 2:
            first = first_tokens(attention_mask, self.cp_group)
            attention_mask = padding_hidden(attention_mask, places, self.cp_group)
        of_query, of_key = ((own - first[:, None]) // self.chunk for own in (places, keys))
        other = (of_query[:, :, None] != of_key[:, None, :])[:, None]
        return attend(query, key, value, other if attention_mask is None else other | attention_mask, attn_mask_type)


@functools.cache
def chunked(fused: type) -> type:
    """A subclass of ``fused`` (TransformerEngine's attention) that leaves sequences of several chunks to torch."""

    class AttentionInOneChunk(fused):
        """TransformerEngine's attention if no sequence is longer than a chunk, else torch's."""

        def __init__(
            self, config: TransformerConfig, *places: Any, cp_comm_type: str | None = None, **more: Any
        ) -> None:
            super().__init__(config, *places, cp_comm_type=cp_comm_type, **more)
            torchs = ChunkedAttention(config, *places, **more)
            self.__dict__["torchs"] = torchs  # it has no parameters, and is no submodule

        def forward(
            self, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, packed_seq_params: Any = None, **more: Any
        ) -> Tensor:
            torchs: ChunkedAttention = vars(self)["torchs"]
            longest = key.size(0) * torchs.cp_group.size()
            if packed_seq_params is not None:
                longest = min(longest, packed_seq_params.max_seqlen_kv or longest)
            attend = super().forward if longest <= torchs.chunk else torchs.train(self.training)
            output: Tensor = attend(query, key, value, *arguments, packed_seq_params=packed_seq_params, **more)
            return output

    return AttentionInOneChunk
