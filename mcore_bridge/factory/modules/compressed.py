"""Attention to the latest tokens and to compressed keys of all tokens, in torch on any device.

There is one head of keys, and the keys are also the values. A part of each key is rotated, so the same part of the
output is rotated back. Heads have sinks. A compressed key is the mean of the keys of neighbouring tokens, with a weight
for each dim. A query reads all compressed keys before it, or the best ones by an indexer, whose scores nothing trains.

Every TP rank computes all keys and selections, since all heads share them. So does every CP rank, for its own queries.
Scores and masks are in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    checkpoint,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn

from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.modules.backend import LayerContext, norm_of, say
from mcore_bridge.factory.modules.latent import ReplicatedLinear, read_by_heads
from mcore_bridge.factory.modules.mixers.mixer import submodules_for
from mcore_bridge.factory.modules.scores import ScoresCoreAttention
from mcore_bridge.factory.modules.selection import best, scores_of
from mcore_bridge.factory.modules.torch_modules import (
    Norm,
    UnitNorm,
    first_tokens,
    gather_text,
    packed_lengths,
    placement,
    places_in_text,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from mcore_bridge.config.rope import Rope

    Rotate = Callable[[Tensor, Tensor], Tensor]

_OF_WINDOWS, _OF_COMPRESSED = 1, 0
"""The places of the two ropes in the angles of ``BothRotaryEmbeddings``."""


def adapt_compressed(layer: Any, context: LayerContext) -> None:
    """Replace the attention of a layer, if the model compresses keys."""
    config, backend = context.config, context.backend
    if getattr(config, "compression_ratios", None) is None:
        return
    if backend == "te":
        say("TransformerEngine has no attention to compressed keys: torch computes it, some queries at a time")
    if layer.input_layernorm is IdentityOp:  # TransformerEngine would fuse the norm into another linear layer
        layer.input_layernorm = norm_of(backend, config)
    linear = submodules_for(backend, normed=False)
    layer.self_attention = ModuleSpec(
        module=CompressedAttention,
        params={"attn_mask_type": AttnMaskType.causal},  # MTP layers of megatron-core read it here
        submodules=CompressedSubmodules(linear.in_proj, linear.out_proj, norm_of(backend, config)),
    )


@dataclass
class CompressedSubmodules:
    """The modules of a backend: the projection to all heads, the one back to hidden states, and a norm."""

    linear_q_up_proj: Any
    linear_proj: Any
    norm: Any


class Compressor(nn.Module):
    """One key for every ``ratio`` tokens: the normed mean of their keys, with a weight for each token and dim.

    If keys are selected, each token has two keys. One counts for its own window, the other for the next window.
    """

    def __init__(self, config: Any, dim: int) -> None:
        super().__init__()
        self.dim, self.ratio = dim, config.compression_ratios[config.compression]
        self.overlaps = config.compression == "selected"
        width = dim * (1 + self.overlaps)
        self.linear_kv = ReplicatedLinear(config.hidden_size, width, config)
        self.linear_gate = ReplicatedLinear(config.hidden_size, width, config)
        self.places = nn.Parameter(torch.empty(self.ratio, width, **placement(config)))
        self.norm = Norm(config, dim, config.layernorm_epsilon)
        self.norm.weight.sequence_parallel = False  # type: ignore[attr-defined]  # each TP rank norms all of them
        if config.perform_initialization:
            nn.init.zeros_(self.places)

    def projected(self, hidden: Tensor) -> Tensor:
        """Keys and gates of the tokens of this TP rank, ``[s, b, 2 * width]``, from ``[s, b, hidden]``."""
        return torch.cat((self.linear_kv(hidden)[0], self.linear_gate(hidden)[0]), -1)

    def forward(self, tokens: Tensor, angles: Tensor, rotate: Rotate) -> Tensor:
        """Compressed keys ``[s // ratio, b, dim]``, rotated like the first token of their window.

        Args:
            tokens: what ``projected`` gives, for one whole text.
            angles: of all positions, ``[s, 1, 1, rotated dims]``.
            rotate: rotates the last dims of ``[s, b, heads, dim]`` by such angles.
        """
        count = tokens.size(0) // self.ratio
        short = self.ratio - tokens.size(0) if not count else 0  # so that all parameters have gradients, if only zeros
        whole = nn.functional.pad(tokens, (0, 0, 0, 0, 0, short))[: max(count, 1) * self.ratio]
        keys, gates = whole.unflatten(0, (-1, self.ratio)).chunk(2, -1)
        gates = gates.float() + self.places.float()[:, None]
        if self.overlaps:
            keys, gates = self._with_window_before(keys, 0.0), self._with_window_before(gates, float("-inf"))
        compressed = self.norm((gates.softmax(1).to(keys.dtype) * keys).sum(1))[:count]
        return rotate(compressed[:, :, None], angles[:: self.ratio][:count])[:, :, 0]

    def _with_window_before(self, windows: Tensor, fill: float) -> Tensor:
        """Windows ``[n, ratio, b, 2 * dim]`` as ``[n, 2 * ratio, b, dim]``: the first dims are of the window before."""
        before, own = windows.split(self.dim, -1)
        return torch.cat((nn.functional.pad(before, (*(0, 0) * 3, 1, 0), value=fill)[:-1], own), 1)


class CompressedIndexer(nn.Module):
    """Selects compressed keys for each query, by small heads with compressed keys of their own. It is frozen."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.heads, self.dim, self.num_selected = (
            config.dsa_indexer_n_heads,
            config.dsa_indexer_head_dim,
            config.dsa_indexer_topk,
        )
        self.linear_wq_b = ReplicatedLinear(config.query_rank, self.heads * self.dim, config)
        self.linear_weights_proj = ReplicatedLinear(config.hidden_size, self.heads, config)
        self.compressor = Compressor(config, self.dim)
        self.requires_grad_(False)

    def projected(self, hidden: Tensor, latent: Tensor) -> Tensor:
        """What ``selected`` reads, for the tokens of this TP rank."""
        own = self.linear_wq_b(latent)[0], self.linear_weights_proj(hidden)[0]
        return torch.cat((*own, self.compressor.projected(hidden)), -1)

    def selected(self, tokens: Tensor, later: Tensor, angles: Tensor, rotate: Rotate, places: Tensor) -> Tensor:
        """``[b, s, n]``, True for the best compressed keys of each query, and perhaps for some that are ``later``.

        Args:
            tokens: what ``projected`` gives, for one whole text.
            later: ``[s, n]``, True for compressed keys that a query does not see.
            angles, rotate: as in ``Compressor``.
            places: of the queries in the text, ``[s]``.
        """
        query, weights, own = tokens.split((self.heads * self.dim, self.heads, self._width(tokens)), -1)
        keys = self.compressor(own, angles, rotate)
        query = rotate(query[places].unflatten(-1, (self.heads, self.dim)), angles[places])
        scores = scores_of(query, keys, weights[places].float() * (self.heads**-0.5 * self.dim**-0.5))
        return best(scores.masked_fill(later, float("-inf")), self.num_selected)

    def _width(self, tokens: Tensor) -> int:
        return tokens.size(-1) - self.heads * (self.dim + 1)


class CompressedCoreAttention(ScoresCoreAttention):
    """Core attention to the tokens of a window, and to compressed keys behind them."""

    def forward(self, query: Tensor, key: Tensor, unseen: Tensor, places: Tensor) -> Tensor:  # type: ignore[override]
        """``[s, b, heads, dim]`` from queries ``[s, b, heads, dim]`` and keys ``[t + n, b, 1, dim]``.

        ``unseen`` is ``[b, s, n]``, True for compressed keys that a query does not read. ``places`` are those of the
        queries in the text of t tokens.
        """
        hidden = self._hidden(places, key.size(0) - unseen.size(-1), causal=True, attention_mask=None)
        assert hidden is not None
        hidden = torch.cat((hidden.expand(unseen.size(0), -1, -1), unseen), -1)[:, None]
        query, key = (heads.permute(1, 2, 0, 3) for heads in (query, key))
        with self._rng():
            return self._attend(query, key, key, hidden).permute(2, 0, 1, 3)


class GroupedLinear(ColumnParallelLinear):
    """A linear layer of each group of heads, ``[s, b, n]`` to ``[s, b, groups * rank]``. A rank has whole groups."""

    def __init__(self, config: Any, tp_group: Any) -> None:
        inputs = config.num_attention_heads * config.kv_channels // config.output_groups
        self.num_groups = config.output_groups // config.tensor_model_parallel_size
        super().__init__(
            inputs,
            config.output_groups * config.output_rank,
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=False,
            tp_group=tp_group,
        )

    def forward(self, heads: Tensor) -> Tensor:
        groups, weights = heads.unflatten(-1, (self.num_groups, -1)), self.weight.unflatten(0, (self.num_groups, -1))
        return torch.einsum("sbgi,goi->sbgo", groups, weights).flatten(-2)


class CompressedAttention(MegatronModule):
    """Attention with low-rank queries, one head of keys, and an output that groups of heads project first."""

    def __init__(
        self, config: Any, submodules: CompressedSubmodules, layer_number: int, pg_collection: Any, **unused: Any
    ) -> None:
        super().__init__(config)
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        self.head_dim, eps = config.kv_channels, config.layernorm_epsilon
        rope: Rope = config.hf_sliding_rope if config.compression is None else config.hf_rope
        self.rope = _OF_WINDOWS if config.compression is None else _OF_COMPRESSED
        self.rope_factor, self.num_rotated = rope.attention_factor, rope.rotary_dim
        linear = {"config": config, "is_expert": False, "bias": False, "tp_group": self.tp_group}
        hidden, rank, norm = config.hidden_size, config.query_rank, submodules.norm
        self.linear_q_down_proj = ReplicatedLinear(hidden, rank, config)
        self.latent_layernorm = norm(config=config, hidden_size=rank, eps=eps)
        self.linear_q_up_proj = submodules.linear_q_up_proj(
            rank,
            config.num_attention_heads * self.head_dim,
            **{**linear, "init_method": config.init_method, "gather_output": False, "skip_bias_add": False},
        )
        self.head_norm = UnitNorm(config, self.head_dim, eps)
        self.linear_kv_down_proj = ReplicatedLinear(hidden, self.head_dim, config)
        self.kv_layernorm = norm(config=config, hidden_size=self.head_dim, eps=eps)
        self.core_attention = CompressedCoreAttention(
            config, layer_number, AttnMaskType.causal, "self", pg_collection=pg_collection
        )
        self.linear_o_down_proj = GroupedLinear(config, self.tp_group)
        self.linear_proj = submodules.linear_proj(
            config.output_groups * config.output_rank,
            hidden,
            **{**linear, "init_method": config.output_layer_init_method},
            input_is_parallel=True,
            skip_bias_add=True,
        )
        self.compressor = None if config.compression is None else Compressor(config, self.head_dim)
        self.indexer = CompressedIndexer(config) if config.compression == "selected" else None
        modules = config.recompute_modules or ()
        self.recomputes = config.recompute_granularity == "selective" and "core_attn" in modules

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        inference_context: Any = None,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: Any = None,
        *,
        inference_params: Any = None,
        **unused: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """``[s, b, hidden]`` from ``[s, b, hidden]``: tokens of this CP rank, and with SP of this TP rank.

        Args:
            hidden_states: the input.
            attention_mask: None, or ``[b, s]`` as in transformers, with padding behind the tokens of a row alone.
                Causal masks of megatron-core (four dims) are ignored, since this attention is always causal.
            inference_context: must be None.
            rotary_pos_emb: the angles of both ropes.
            packed_seq_params: the starts of packed sequences. Each has compressed keys of its own.
            inference_params: must be None.
        """
        if inference_context is not None or inference_params is not None:
            raise ConfigError(
                "inference_context must be None for attention to compressed keys, which keeps no state, found one: "
                "export the weights to an engine"
            )
        of_rows = attention_mask if attention_mask is not None and attention_mask.dim() == 2 else None
        if of_rows is not None and bool(first_tokens(of_rows, self.cp_group).any()):
            raise ConfigError(
                "attention_mask must begin with a token in each row, found padding on the left: compressed keys are "
                "counted from the first place. Pad rows on the right, or pack them"
            )
        assert rotary_pos_emb is not None
        angles = rotary_pos_emb[self.rope, ..., : self.num_rotated]
        if packed_seq_params is None:
            angles = gather_text(angles, self.cp_group)
        latent = self.latent_layernorm(self.linear_q_down_proj(hidden_states)[0])
        query = self.head_norm(self.linear_q_up_proj(latent)[0].unflatten(-1, (-1, self.head_dim)))
        texts = [query, self._whole(self.kv_layernorm(self.linear_kv_down_proj(hidden_states)[0]))]
        if self.compressor is not None:
            texts.append(self._whole(self.compressor.projected(hidden_states)))
        if self.indexer is not None:
            with torch.no_grad():
                texts.append(self._whole(self.indexer.projected(hidden_states, latent)))
        num_ranks = self.cp_group.size()
        lengths = [query.size(0)] if packed_seq_params is None else packed_lengths(packed_seq_params, num_ranks)
        outputs = [self._attended(angles, *own) for own in zip(*(text.split(lengths) for text in texts), strict=True)]
        out: tuple[Tensor, Tensor | None] = self.linear_proj(self.linear_o_down_proj(torch.cat(outputs)))
        return out

    def _whole(self, own: Tensor) -> Tensor:
        """The tokens of all TP ranks. Gradients are whole on each rank, as ``_attended`` sums them."""
        if not self.config.sequence_parallel:
            return own
        return gather_from_sequence_parallel_region(own, tensor_parallel_output_grad=False, group=self.tp_group)

    def _attended(self, angles: Tensor, query: Tensor, key: Tensor, *compressed: Tensor) -> Tensor:
        """The output of core attention for one text, rotated back, ``[s, b, heads of this rank * dim]``."""
        key, *whole = (gather_text(tokens, self.cp_group) for tokens in (key, *compressed))
        angles, places = angles[: key.size(0)], places_in_text(query, key, self.cp_group)
        query, key = self._rotated(query, angles[places]), self._rotated(key[:, :, None], angles)
        unseen = torch.zeros(query.size(1), query.size(0), 0, dtype=torch.bool, device=query.device)
        if self.compressor is not None:
            tokens, *indexed = whole
            behind = self.compressor(tokens, angles, self._rotated)
            key, unseen = torch.cat((key, behind[:, :, None])), self._unseen(behind, angles, places, *indexed)
        key = read_by_heads(key, self.tp_group)
        core: Any = self.core_attention
        read = query, key, unseen, places
        context = checkpoint(core, False, *read) if self.recomputes else core(*read)
        return self._rotated(context, -angles[places]).flatten(2)

    @torch.no_grad()
    def _unseen(self, behind: Tensor, angles: Tensor, places: Tensor, indexed: Tensor | None = None) -> Tensor:
        """``[b, s, n]``, True for compressed keys with later tokens, and for those that are not selected."""
        assert self.compressor is not None
        complete = (places + 1).div(self.compressor.ratio, rounding_mode="floor")
        later = torch.arange(behind.size(0), device=behind.device) >= complete[:, None]
        unseen = later.expand(behind.size(1), -1, -1)
        if indexed is None:
            return unseen
        assert self.indexer is not None
        return unseen | ~self.indexer.selected(indexed, later, angles, self._rotated, places)

    def _rotated(self, heads: Tensor, angles: Tensor) -> Tensor:
        """``[s, b, heads, dim]`` with pairs of neighbours in its last dims turned by ``[s, 1, 1, rotated dims]``."""
        plain, turned = heads.split((heads.size(-1) - self.num_rotated, self.num_rotated), -1)
        exact = turned.float()
        cos, sin = angles.cos() * self.rope_factor, angles.sin() * self.rope_factor
        across = torch.stack((-exact[..., 1::2], exact[..., 0::2]), -1).flatten(-2)
        return torch.cat((plain, (exact * cos + across * sin).to(heads.dtype)), -1)
