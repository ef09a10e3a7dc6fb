"""Core attention with soft caps, sinks, and learned scores by distance.

Torch's fused kernels have none of these, so scores are in memory: those of some queries at a time, if there are many.
The backward then computes them again.

Scores by distance are profiles over the distance to a key, which each query mixes. A projection gives each query the
weights of the profiles. They travel behind the dims of the query, so megatron-core recomputes and packs them like
queries, and a temperature of queries scales both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mcore_bridge.factory.modules.attention_gate import projection_beside
from mcore_bridge.factory.modules.backend import LayerContext, mixed, say
from mcore_bridge.factory.modules.torch_modules import CoreAttention, placement, sharded_tensors

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

_AT_ONCE = 1 << 27
"""How many scores are in memory at once. Their tensors for the backward take some 10 bytes for each."""


def adapt_scores(layer: Any, context: LayerContext) -> None:
    """Use ``ScoresCoreAttention`` for soft caps (which TE lacks as well), and for sinks on backend torch."""
    is_capped = getattr(context.config, "attention_softcap", None) is not None
    if not is_capped and (context.backend == "te" or context.config.softmax_type != "learnable"):
        return
    if context.backend == "te":
        say("TransformerEngine has no attention with soft caps: these layers use torch's")
    layer.self_attention.submodules.core_attention = ScoresCoreAttention


def adapt_relative(layer: Any, context: LayerContext) -> None:
    """Add scores by distance to the attention of a layer, if ``relative_profiles`` of its config, their number, is set.

    ``relative_extent`` is how many distances they have.
    """
    if getattr(context.config, "relative_profiles", None) is None:
        return
    if context.backend == "te":
        say("TransformerEngine has no attention with learned scores by distance: these layers use torch's")
    attention = layer.self_attention
    attention.submodules.core_attention = RelativeCoreAttention
    attention.module = mixed(RelativeQueries, attention.module)
    attention.params = {**(attention.params or {}), "beside": projection_beside(layer, context)}


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

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None, places: Tensor | None = None
    ) -> Tensor:
        repeats = query.size(1) // key.size(1)
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        if hidden is None and places is not None:
            hidden = torch.arange(key.size(2), device=places.device) > places[:, None]
        count = max(1, _AT_ONCE // (query.size(0) * query.size(1) * key.size(2)))
        if query.size(2) <= count:
            return self._of_queries(query, key, value, hidden, places)
        outputs = []
        for start in range(0, query.size(2), count):
            own = slice(start, start + count)
            masks = hidden if hidden is None or hidden.size(-2) == 1 else hidden[..., own, :]
            given = query[:, :, own], key, value, masks, None if places is None else places[own]
            outputs.append(checkpoint(self._of_queries, *given, use_reentrant=False))
        return torch.cat(outputs, dim=2)

    def _of_queries(
        self, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None, places: Tensor | None
    ) -> Tensor:
        """``_attend`` of some queries, with keys and values for each of their heads."""
        scores = self._scores(query, key, places)
        if self.cap is not None:
            scores = torch.tanh(scores / self.cap) * self.cap
        if hidden is not None:
            scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        weights = self._softmax(scores)
        return nn.functional.dropout(weights, self.dropout, self.training) @ value

    def _scores(self, query: Tensor, key: Tensor, places: Tensor | None) -> Tensor:
        """The scores ``[b, n, s, t]`` of queries at ``places`` ``[s]``, before caps and masks."""
        return query @ key.transpose(-1, -2) * self.softmax_scale

    def _softmax(self, scores: Tensor) -> Tensor:
        if self.softmax_offset is None:
            return scores.softmax(-1, dtype=torch.float32).to(scores.dtype)
        sinks = self.softmax_offset.to(scores.dtype)[:, None, None].expand(scores.size(0), -1, scores.size(2), 1)
        return torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]


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

    def _scores(self, query: Tensor, key: Tensor, places: Tensor | None) -> Tensor:
        assert places is not None
        query, weights = query.split((key.size(-1), query.size(-1) - key.size(-1)), -1)
        # ranks have different heads, so the backward sums the gradients of the profiles
        by_distance = weights @ copy_to_tensor_model_parallel_region(self.profiles)
        distance = places[:, None] - torch.arange(key.size(-2), device=places.device)
        index = distance.clamp(0, self.extent - 1).expand(*by_distance.shape[:2], -1, -1)
        outside = (distance < 0) | (distance >= self.extent)
        return super()._scores(query, key, places) + by_distance.gather(-1, index).masked_fill(outside, 0.0)
