"""Attention whose scores are held between minus and plus a cap, softly: by a tanh."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mcore_bridge.factory.modules import CoreAttention

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


def adapt_softcap(layer: Any, config: TransformerConfig, backend: str) -> None:
    """``CappedCoreAttention`` where ``config.attention_softcap`` is set, for either backend: TE has no such kernel."""
    if getattr(config, "attention_softcap", None) is not None:
        layer.self_attention.submodules.core_attention = CappedCoreAttention


class CappedCoreAttention(CoreAttention):
    """``CoreAttention`` of capped scores, in the steps of transformers, with all scores in memory."""

    def __init__(self, config: TransformerConfig, *places: Any, **arguments: Any) -> None:
        super().__init__(config, *places, **arguments)
        self.cap: float = config.attention_softcap

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None, *, causal: bool) -> Tensor:
        repeats = query.size(1) // key.size(1)
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        scores = query @ key.transpose(-1, -2) * self.softmax_scale
        scores = torch.tanh(scores / self.cap) * self.cap
        if hidden is None and causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        if hidden is not None:
            scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
        return nn.functional.dropout(weights, self.dropout, self.training) @ value
