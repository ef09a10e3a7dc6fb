"""Core attention with soft caps and sinks. It keeps scores in memory, since torch's fused kernels have neither."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from mcore_bridge.factory.modules.backend import LayerContext, say
from mcore_bridge.factory.modules.torch_modules import CoreAttention, placement, sharded_tensors

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


def adapt_scores(layer: Any, context: LayerContext) -> None:
    """Use ``ScoresCoreAttention`` for soft caps (which TE lacks as well), and for sinks on backend torch."""
    is_capped = getattr(context.config, "attention_softcap", None) is not None
    if not is_capped and (context.backend == "te" or context.config.softmax_type != "learnable"):
        return
    if context.backend == "te":
        say("TransformerEngine has no attention with soft caps: these layers use torch's")
    layer.self_attention.submodules.core_attention = ScoresCoreAttention


class ScoresCoreAttention(CoreAttention):
    """``CoreAttention`` with the steps of transformers' eager attention.

    With ``config.attention_softcap``, a tanh keeps scores between minus and plus that number. With ``softmax_type``
    "learnable", each head has a sink: a learned score, ``softmax_offset``, that only adds to the sum of the softmax.
    """

    softmax_types: ClassVar[tuple[str, ...]] = ("vanilla", "learnable")

    def __init__(self, config: TransformerConfig, *places: Any, **arguments: Any) -> None:
        super().__init__(config, *places, **arguments)
        self.cap: float | None = getattr(config, "attention_softcap", None)
        self.softmax_offset = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = nn.Parameter(torch.empty(heads, **placement(config)))
            if config.perform_initialization:
                config.init_method(self.softmax_offset)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """The parameters for a checkpoint of megatron-core, with the sinks cut over TP."""
        return sharded_tensors(self, prefix, sharded_offsets)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None, *, causal: bool) -> Tensor:
        repeats = query.size(1) // key.size(1)
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        scores = query @ key.transpose(-1, -2) * self.softmax_scale
        if self.cap is not None:
            scores = torch.tanh(scores / self.cap) * self.cap
        if hidden is None and causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        if hidden is not None:
            scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        weights = self._softmax(scores)
        return nn.functional.dropout(weights, self.dropout, self.training) @ value

    def _softmax(self, scores: Tensor) -> Tensor:
        if self.softmax_offset is None:
            return scores.softmax(-1, dtype=torch.float32).to(scores.dtype)
        sinks = self.softmax_offset.to(scores.dtype)[:, None, None].expand(scores.size(0), -1, scores.size(2), 1)
        return torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
