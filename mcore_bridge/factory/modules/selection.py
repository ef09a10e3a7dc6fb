"""Latent attention to the keys that an indexer selects for each query, in torch on any device.

megatron-core's sparse attention (``adapt_sparse`` in ``latent.py``) has no sinks, and selects no pools of keys. Here
scores and masks are in memory. Every TP rank computes the whole selection. Several layers may share one selection.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from megatron.core.models.common.embeddings import apply_rotary_pos_emb
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn

from mcore_bridge.config.layer_kinds import selects_keys, shares_selection
from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.modules.backend import LayerContext, Selection, say
from mcore_bridge.factory.modules.latent import LatentAttention, ReplicatedLinear
from mcore_bridge.factory.modules.scores import ScoresCoreAttention
from mcore_bridge.factory.modules.torch_modules import (
    Norm,
    first_tokens,
    gather_text,
    packed_lengths,
    padding_hidden,
    placement,
    places_in_text,
)

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import MLATransformerConfig

_HALVES = SimpleNamespace(apply_rope_fusion=False, rotary_interleaved=False, multi_latent_attention=False)
"""What ``apply_rotary_pos_emb`` reads of a config, to rotate halves."""


def adapt_selection(layer: Any, context: LayerContext) -> None:
    """Lets a layer attend to selected keys, if the model has indexers and megatron-core's sparse attention does not."""
    if not selects_keys(vars(context.config)):
        return
    _require_no_recompute(context.config)
    if context.backend == "te":
        say("TransformerEngine has no attention to selected keys: torch computes it, with scores in memory")
    layer.self_attention.module = SelectingAttention
    layer.self_attention.submodules.core_attention = ModuleSpec(
        SelectingCoreAttention, {"selection": context.selection}
    )


def _require_no_recompute(config: Any) -> None:
    """Raises ``ConfigError`` if a recompute would have no selection, or the selection of a later microbatch."""
    granularity, modules = config.recompute_granularity, config.recompute_modules or ()
    shared = config.dsa_indexer_topk_freq > 1
    if (granularity == "selective" and "core_attn" in modules) or (granularity == "full" and shared):
        raise ConfigError(
            f"attention must not be recomputed in this model, found recompute_granularity={granularity!r}, "
            f"recompute_modules={[*modules]}. A selection is made before core attention. With indexer_types 'shared', "
            "a layer uses the latest selection of another layer, which may be of a later microbatch. Recompute other "
            "modules."
        )


def drop_selection(chunk: GPTModel) -> None:
    """Free the selections of a forward behind it, also if it fails."""
    attentions = [getattr(layer, "self_attention", None) for layer in getattr(chunk.decoder, "layers", ())]
    cores = [getattr(attention, "core_attention", None) for attention in attentions]
    own = [core for core in cores if isinstance(core, SelectingCoreAttention)]

    def drop(*arguments: object) -> None:
        for core in own:
            core.indexed, core.selection.hidden = None, []

    if own:
        chunk.decoder.register_forward_hook(drop, always_call=True)


class Indexer(nn.Module):
    """Scores of each key for each query, from separate small heads. Only a separate loss could train it.

    It is frozen: the order of scores has no gradient.
    """

    def __init__(self, config: MLATransformerConfig, epsilon: float) -> None:
        super().__init__()
        self.config, self.rotated = config, config.qk_pos_emb_head_dim
        self.num_selected: Any = config.dsa_indexer_topk
        self.heads, self.dim = config.dsa_indexer_n_heads, config.dsa_indexer_head_dim
        assert self.heads is not None
        assert self.dim is not None
        biased = copy.copy(config)
        biased.normalization, biased.layernorm_zero_centered_gamma = "LayerNorm", False
        self.linear_wq_b = ReplicatedLinear(config.q_lora_rank, self.heads * self.dim, config)
        self.linear_wk = ReplicatedLinear(config.hidden_size, self.dim, config)
        self.k_norm = Norm(biased, self.dim, epsilon)
        self.linear_weights_proj = ReplicatedLinear(config.hidden_size, self.heads, config)
        self.requires_grad_(False)

    def forward(self, hidden: Tensor, latent: Tensor, rotate: Any) -> tuple[Tensor, Tensor, Tensor]:
        """What ``selected`` needs, for the tokens of this CP rank.

        Args:
            hidden: the input of attention, ``[s, b, hidden]``. With SP, s are the tokens of this TP rank.
            latent: the normed latent of queries, ``[s, b, rank]``; for packed sequences without ``b``.
            rotate: rotates the last dims of ``[s, b, heads, dim]``.

        Returns:
            Queries ``[s, b, heads, dim]``, keys ``[s, b, dim]`` and weights of heads ``[s, b, heads]``.
        """
        query = self.linear_wq_b(latent.view(*hidden.shape[:2], -1))[0]
        parts = (query, self._keys(hidden), self.linear_weights_proj(hidden)[0])
        tokens = torch.cat(parts, -1)
        if self.config.sequence_parallel:
            tokens = gather_from_sequence_parallel_region(tokens)
        query, key, weights = tokens.split([part.size(-1) for part in parts], -1)
        query, key = (self._rotated(part.unflatten(-1, (-1, self.dim)), rotate) for part in (query, key))
        return query, key.flatten(2), weights.float() * (self.heads**-0.5 * self.dim**-0.5)

    def _keys(self, hidden: Tensor) -> Tensor:
        keys: Tensor = self.k_norm(self.linear_wk(hidden)[0])
        return keys

    def _rotated(self, heads: Tensor, rotate: Any) -> Tensor:
        turned: Tensor = rotate(heads, self.rotated)
        return turned

    def selected(self, query: Tensor, key: Tensor, weights: Tensor, hidden: Tensor, places: Places) -> Tensor:
        """``[b, s, t]``, True for the best keys of each query, and perhaps for some that are hidden anyway.

        Args:
            query, key, weights: as for ``scores_of``; keys of all CP ranks.
            hidden: ``[b or 1, s, t]``, True for later tokens and padding.
            places: where tokens are.
        """
        scores = scores_of(query, key, weights).masked_fill(hidden, float("-inf"))
        best = scores.topk(min(self.num_selected, key.size(0)), dim=-1).indices
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)


class Places(NamedTuple):
    """Where tokens are in a text: the queries of this CP rank ``[s]``, and the first token of each row ``[b]``."""

    queries: Tensor
    first: Tensor


class PooledIndexer(Indexer):
    """An indexer that selects pools of neighbouring keys. A pool has one key, the weighted mean of its keys.

    Pools are counted from the first token of a row. A query also sees all earlier keys of the pool that it is in, if
    this pool has later tokens. Keys have no rope.
    """

    def __init__(self, config: Any, epsilon: float) -> None:
        super().__init__(config, epsilon)
        self.pool = config.dsa_indexer_pool
        self.pool_places = nn.Parameter(torch.empty(self.pool, self.dim, **placement(config)), requires_grad=False)
        self.linear_pool_gate = ReplicatedLinear(config.hidden_size, self.dim, config).requires_grad_(False)
        if config.perform_initialization:
            nn.init.zeros_(self.pool_places)

    def _keys(self, hidden: Tensor) -> Tensor:
        """Keys, and the gates by which they count in their pool."""
        return torch.cat((super()._keys(hidden), self.linear_pool_gate(hidden)[0]), -1)

    def _rotated(self, heads: Tensor, rotate: Any) -> Tensor:
        return heads

    def selected(self, query: Tensor, key: Tensor, weights: Tensor, hidden: Tensor, places: Places) -> Tensor:
        """As for ``Indexer``, where keys are followed by gates."""
        first, count = places.first[:, None, None], key.size(0) // self.pool
        complete = self._complete(places.queries[None, :, None] - first)
        pool_of = (torch.arange(key.size(0), device=key.device) - first).div(self.pool, rounding_mode="floor")
        tail = pool_of == complete
        if not count:
            return tail
        scores = scores_of(query, self._pooled(key, places.first, count), weights)
        later = torch.arange(count, device=key.device) >= complete  # so are pools behind the last token of a row
        best = scores.masked_fill(later, float("-inf")).topk(min(self.num_selected // self.pool, count), -1).indices
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True) & ~later
        inside = (pool_of >= 0) & (pool_of < count)
        own = chosen.gather(-1, pool_of.clamp(0, count - 1).expand(*chosen.shape[:2], -1))
        return tail | (own & inside)

    def _complete(self, places: Tensor) -> Tensor:
        """The number of pools that a query at these places sees whole."""
        return (places + 1).div(self.pool, rounding_mode="floor")

    def _pooled(self, key: Tensor, first: Tensor, count: int) -> Tensor:
        """The keys of ``count`` pools of each row, ``[pools, b, dim]``. Pools behind the text are not meaningful."""
        offsets = torch.arange(count * self.pool, device=key.device)[:, None] + first
        taken = key.gather(0, offsets.clamp(max=key.size(0) - 1)[..., None].expand(-1, -1, key.size(-1)))
        keys, gates = taken.unflatten(0, (count, self.pool)).split(self.dim, -1)
        shares = (gates.float() + self.pool_places.float()[:, None]).softmax(1).to(keys.dtype)
        return (shares * keys).sum(1)


def scores_of(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    """The score of each key for each query, fp32 ``[b, s, t]``: a weighted sum over heads, without negative parts.

    Args:
        query: ``[s, b, heads, dim]``.
        key: ``[t, b, dim]``, the keys of all CP ranks.
        weights: fp32 ``[s, b, heads]``.
    """
    keys = key.float().permute(1, 2, 0)
    heads = zip(query.float().unbind(2), weights.unbind(2), strict=True)  # one by one, to keep scores of one in memory
    parts = ((one.transpose(0, 1) @ keys).relu_() * weight.t()[..., None] for one, weight in heads)
    total = next(parts)
    for part in parts:
        total += part
    return total


def indexer_of(config: Any) -> Indexer:
    """The indexer of a layer. In transformers, each kind has an epsilon of its own."""
    if getattr(config, "dsa_indexer_pool", None):
        return PooledIndexer(config, 1e-6)
    return Indexer(config, config.layernorm_epsilon)


class SelectingCoreAttention(ScoresCoreAttention):
    """Core attention to selected keys. Layers without an ``indexer`` use the selection of a layer before them."""

    def __init__(
        self, config: MLATransformerConfig, layer_number: int, *places: Any, selection: Selection, **arguments: Any
    ) -> None:
        super().__init__(config, layer_number, *places, **arguments)
        self.selection = selection
        sharing = {"freq": config.dsa_indexer_topk_freq, "offset": config.dsa_indexer_skip_topk_offset}
        self.indexer: Indexer | None = None
        if not shares_selection(layer_number - 1, **sharing):
            self.indexer = indexer_of(config)
        self.indexed: tuple[Tensor, Tensor, Tensor] | None = None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Compute attention, as ``CoreAttention`` does for the same arguments."""
        self._require(attention_mask, attention_bias, packed_seq_params)

        def sequences(tensors: tuple[Tensor, ...]) -> list[Any]:
            if packed_seq_params is None:
                return [tensors]
            lengths = packed_lengths(packed_seq_params, self.cp_group.size())
            return [*zip(*(tensor.split(lengths) for tensor in tensors), strict=True)]

        inputs: tuple[Tensor, ...] = (query, key, value)
        if packed_seq_params is not None:
            inputs = tuple(tensor.unsqueeze(1) for tensor in inputs)
        if self.indexed is not None:
            indexed, self.indexed = self.indexed, None
            self.selection.hidden = [self._unselected(parts, attention_mask) for parts in sequences(indexed)]
        runs = zip(sequences(inputs), self.selection.hidden, strict=True)
        output = torch.cat([self._attended(parts, hidden) for parts, hidden in runs])
        return output if packed_seq_params is None else output.squeeze(1)

    @torch.no_grad()
    def _unselected(self, indexed: tuple[Tensor, Tensor, Tensor], attention_mask: Tensor | None) -> Tensor:
        """``[b, 1, s, t]``, True for keys of later tokens, of padding, and keys that are not selected."""
        query, key, weights = indexed
        places, first = places_in_text(query, key, self.cp_group), torch.zeros(1, dtype=torch.long, device=query.device)
        if attention_mask is None:
            attention_mask = torch.zeros((), dtype=torch.bool, device=query.device)
        elif attention_mask.dim() == 2:
            first = first_tokens(attention_mask, self.cp_group)
            attention_mask = padding_hidden(attention_mask, places, self.cp_group)
        keys = gather_text(key, self.cp_group)
        hidden = self._hidden(places, keys.size(0), causal=True, attention_mask=attention_mask)
        assert hidden is not None
        assert self.indexer is not None
        whole = hidden.expand(query.size(1), -1, -1, -1)[:, 0] if hidden.dim() == 4 else hidden
        where = Places(places, first.expand(query.size(1)))
        return hidden | ~self.indexer.selected(query, keys, weights, whole, where)[:, None]

    def _attended(self, tensors: tuple[Tensor, Tensor, Tensor], hidden: Tensor) -> Tensor:
        query, key, value = tensors
        if self.cp_group.size() > 1:
            key, value = self._gather(key, value)
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        with self._rng():
            context = self._attend(query, key, value, hidden, causal=False)
        return context.permute(2, 0, 1, 3).flatten(2)


class SelectingAttention(LatentAttention):
    """Latent attention whose core attention gets what an indexer computes from its input and its latent of queries."""

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Any = None,
        position_ids: Any = None,
        packed_seq_params: Any = None,
        inference_context: Any = None,
        **options: Any,
    ) -> Any:
        """The tensors of megatron-core's latent attention, of which the fourth is the normed latent of queries."""
        tensors = super().get_query_key_value_tensors(
            *(hidden_states, key_value_states, position_ids, packed_seq_params), inference_context, **options
        )
        if self.core_attention.indexer is not None:
            rotated = self.config.qk_pos_emb_head_dim
            rotate = self._rotation(hidden_states, packed_seq_params) if rotated else None
            with torch.no_grad():
                self.core_attention.indexed = self.core_attention.indexer(hidden_states, tensors[3], rotate)
        return tensors

    def _rotation(self, hidden: Tensor, packed: Any) -> Any:
        """A function that rotates the last dims of ``[s, b, heads, dim]`` as keys are rotated, but in halves."""
        length = self.rotary_pos_emb.get_rotary_seq_len(None, None, hidden, self.config, packed)
        angles, factor = self.rotary_pos_emb(length, packed_seq=packed is not None)
        starts = None
        if packed is not None:
            starts = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded

        def rotate(heads: Tensor, rotated: int) -> Tensor:
            whole = packed is None or self.config.context_parallel_size == 1
            own = angles[: heads.size(0)] if whole else angles
            plain, turned = heads.split((heads.size(-1) - rotated, rotated), -1)
            turned = turned.squeeze(1) if packed is not None else turned
            options = {"config": _HALVES, "cu_seqlens": starts, "mscale": factor, "cp_group": self.pg_collection.cp}
            turned = apply_rotary_pos_emb(turned, own, **options)
            return torch.cat((plain, turned.unsqueeze(1) if packed is not None else turned), -1)

        return rotate
