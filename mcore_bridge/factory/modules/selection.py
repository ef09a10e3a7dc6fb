"""Attention to the keys that an indexer selects for each query, in torch on any device.

megatron-core's sparse attention (``adapt_sparse`` in ``latent.py``) has no sinks, selects no pools or blocks of keys,
and is latent. Here scores and masks are in memory. Every TP rank selects for its own heads, which mostly share a
selection. Several layers may share one, too.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import apply_rotary_pos_emb
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_concentration_factor_from_config
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn

from mcore_bridge.config.layer_kinds import selects_keys, shares_selection
from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.modules.backend import LayerContext, Selection, free_after_forward, mixed, say, separate_norm
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
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

_HALVES = SimpleNamespace(apply_rope_fusion=False, rotary_interleaved=False, multi_latent_attention=False)
"""What ``apply_rotary_pos_emb`` reads of a config, to rotate halves."""


def adapt_selection(layer: Any, context: LayerContext) -> None:
    """Lets a layer attend to selected keys, if the model has indexers and megatron-core's sparse attention does not."""
    if not selects_keys(vars(context.config)):
        return
    _require_no_recompute(context.config)
    if context.backend == "te":
        say("TransformerEngine has no attention to selected keys: torch computes it, some queries at a time")
    if context.config.multi_latent_attention:
        layer.self_attention.module = SelectingAttention
    else:
        separate_norm(layer, context)
        layer.self_attention.module = mixed(SelectingGroups, layer.self_attention.module)
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
    free_after_forward(chunk.decoder, own, indexed=None)
    free_after_forward(chunk.decoder, [core.selection for core in own], hidden=[])


class Indexer(nn.Module):
    """Scores of each key for each query, from separate small heads. Only a separate loss could train it.

    It is frozen: the order of scores has no gradient.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.num_selected = config, config.dsa_indexer_topk
        self.heads, self.dim = config.dsa_indexer_n_heads, config.dsa_indexer_head_dim

    def forward(self, hidden: Tensor, latent: Tensor, rotate: Any) -> tuple[Tensor, Tensor, Tensor]:
        """What ``selected`` needs, for the tokens of this CP rank.

        Args:
            hidden: the input of attention, ``[s, b, hidden]``. With SP, s are the tokens of this TP rank.
            latent: what queries are made of: the normed latent ``[s, b, rank]``, for packed sequences without ``b``, or
                the input of attention again.
            rotate: rotates some dims of ``[s, b, heads, dim]``.

        Returns:
            Queries ``[s, b, heads, dim]``, keys ``[s, b, dim]`` and weights of heads ``[s, b, heads]``.
        """
        parts = self._parts(hidden, latent)
        tokens = torch.cat(parts, -1)
        if self.config.sequence_parallel:
            tokens = gather_from_sequence_parallel_region(tokens)
        query, key, weights = tokens.split([part.size(-1) for part in parts], -1)
        query, key = (part.unflatten(-1, (-1, self.dim)) for part in (query, key))
        scaled = weights.float() * (self.heads**-0.5 * self.dim**-0.5)
        return self._rotated(query, rotate), self._rotated_keys(key, rotate).flatten(2), scaled

    def _parts(self, hidden: Tensor, latent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``[s, b, heads * dim]``, keys ``[s, b, dim]`` and weights, without a rope."""
        raise NotImplementedError

    def _rotated(self, heads: Tensor, rotate: Any) -> Tensor:
        turned: Tensor = rotate(heads)
        return turned

    def _rotated_keys(self, key: Tensor, rotate: Any) -> Tensor:
        """Keys ``[s, b, 1 or more, dim]`` as ``selected`` reads them."""
        return self._rotated(key, rotate)

    def selected(self, query: Tensor, key: Tensor, weights: Tensor, hidden: Tensor, places: Places) -> Tensor:
        """``[b, 1 or heads of this TP rank, s, t]``, True for the best keys, and maybe for some that are hidden anyway.

        Args:
            query, key, weights: what ``forward`` returns; keys of all CP ranks.
            hidden: ``[b or 1, s, t]``, True for later tokens and padding.
            places: where tokens are.
        """
        raise NotImplementedError


class TokenIndexer(Indexer):
    """Selects tokens by weighted sums over its heads, whose queries are made of the latent of queries."""

    def __init__(self, config: MLATransformerConfig, epsilon: float) -> None:
        super().__init__(config)
        biased = copy.copy(config)
        biased.normalization, biased.layernorm_zero_centered_gamma = "LayerNorm", False
        self.linear_wq_b = ReplicatedLinear(config.q_lora_rank, self.heads * self.dim, config)
        self.linear_wk = ReplicatedLinear(config.hidden_size, self.dim, config)
        self.k_norm = Norm(biased, self.dim, epsilon)
        self.linear_weights_proj = ReplicatedLinear(config.hidden_size, self.heads, config)
        self.requires_grad_(False)

    def _parts(self, hidden: Tensor, latent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query = self.linear_wq_b(latent.view(*hidden.shape[:2], -1))[0]
        return query, self._keys(hidden), self.linear_weights_proj(hidden)[0]

    def _keys(self, hidden: Tensor) -> Tensor:
        keys: Tensor = self.k_norm(self.linear_wk(hidden)[0])
        return keys

    def selected(self, query: Tensor, key: Tensor, weights: Tensor, hidden: Tensor, places: Places) -> Tensor:
        """As in the base class."""
        scores = scores_of(query, key, weights).masked_fill(hidden, float("-inf"))
        return best(scores, self.num_selected)[:, None]


class Places(NamedTuple):
    """Where tokens are in a text: the queries of this CP rank ``[s]``, and the first token of each row ``[b]``."""

    queries: Tensor
    first: Tensor


class PooledIndexer(Indexer):
    """An indexer that selects pools of neighbouring keys. A subclass makes one key of all keys of a pool.

    Pools are counted from the first token of a row. A query also sees all earlier keys of the pool that it is in, if
    this pool has later tokens.
    """

    @property
    def pool(self) -> int:
        """The keys of a pool."""
        return int(self.config.dsa_indexer_pool)

    def selected(self, query: Tensor, key: Tensor, weights: Tensor, hidden: Tensor, places: Places) -> Tensor:
        """As in the base class. More numbers of each token may follow its key."""
        first, count = places.first[:, None, None], key.size(0) // self.pool
        complete = self._complete(places.queries[None, :, None] - first)
        pool_of = (torch.arange(key.size(0), device=key.device) - first).div(self.pool, rounding_mode="floor")
        tail = pool_of == complete
        if not count:
            return tail[:, None]
        scores = scores_of(query, self._pooled(key, places.first, count), weights)
        later = torch.arange(count, device=key.device) >= complete  # so are pools behind the last token of a row
        chosen = best(scores.masked_fill(later, float("-inf")), self.num_selected // self.pool) & ~later
        inside = (pool_of >= 0) & (pool_of < count)
        own = chosen.gather(-1, pool_of.clamp(0, count - 1).expand(*chosen.shape[:2], -1))
        return (tail | (own & inside))[:, None]

    def _complete(self, places: Tensor) -> Tensor:
        """The number of pools that a query at these places sees whole."""
        return (places + 1).div(self.pool, rounding_mode="floor")

    def _pooled(self, key: Tensor, first: Tensor, count: int) -> Tensor:
        """The keys of ``count`` pools of each row, ``[pools, b, dim]``. Pools behind the text are not meaningful."""
        offsets = torch.arange(count * self.pool, device=key.device)[:, None] + first
        taken = key.gather(0, offsets.clamp(max=key.size(0) - 1)[..., None].expand(-1, -1, key.size(-1)))
        return self._joined(taken.unflatten(0, (count, self.pool)))

    def _joined(self, keys: Tensor) -> Tensor:
        """The key of each pool ``[pools, b, dim]``, from the keys of its tokens ``[pools, n, b, dim and more]``."""
        raise NotImplementedError


class GatedPoolIndexer(PooledIndexer, TokenIndexer):
    """Queries are made of a latent. The key of a pool is the weighted mean of its keys, which have no rope."""

    def __init__(self, config: Any, epsilon: float) -> None:
        super().__init__(config, epsilon)
        self.pool_places = nn.Parameter(torch.empty(self.pool, self.dim, **placement(config)), requires_grad=False)
        self.linear_pool_gate = ReplicatedLinear(config.hidden_size, self.dim, config).requires_grad_(False)
        if config.perform_initialization:
            nn.init.zeros_(self.pool_places)

    def _keys(self, hidden: Tensor) -> Tensor:
        """Keys, and the gates by which they count in their pool."""
        return torch.cat((super()._keys(hidden), self.linear_pool_gate(hidden)[0]), -1)

    def _rotated(self, heads: Tensor, rotate: Any) -> Tensor:
        return heads

    def _joined(self, keys: Tensor) -> Tensor:
        keys, gates = keys.split(self.dim, -1)
        shares = (gates.float() + self.pool_places.float()[:, None]).softmax(1).to(keys.dtype)
        return (shares * keys).sum(1)


class MeanPoolIndexer(PooledIndexer):
    """The key of a pool is the normed mean of its keys, with the rope of its first token. No head has a weight.

    The first token of a pool may be on another CP rank. So the cosines and sines of tokens travel behind their keys.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.linear_wqk = ReplicatedLinear(config.hidden_size, (self.heads + 1) * self.dim, config)
        self.q_norm, self.k_norm = (Norm(config, self.dim, config.layernorm_epsilon) for _ in range(2))
        self.requires_grad_(False)

    def _parts(self, hidden: Tensor, latent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key = self.linear_wqk(hidden)[0].split((self.heads * self.dim, self.dim), -1)
        query = self.q_norm(query.unflatten(-1, (self.heads, self.dim))).flatten(-2)
        return query, key, query.new_ones(*query.shape[:2], self.heads)

    def _rotated_keys(self, key: Tensor, rotate: Any) -> Tensor:
        """Keys without a rope. Behind them is what the rope makes of ones in its first half: cosines, then sines."""
        dims = rotate.angles.size(-1)
        ones = torch.zeros_like(key)
        ones[..., : dims // 2] = 1
        return torch.cat((key, rotate(ones)[..., :dims]), -1)

    def _joined(self, keys: Tensor) -> Tensor:
        keys, turns = keys.split((self.dim, keys.size(-1) - self.dim), -1)
        normed: Tensor = self.k_norm(keys.float().mean(1).to(keys.dtype))
        cosines, sines = turns[:, 0].chunk(2, -1)
        left, right, plain = normed.split((*(cosines.size(-1),) * 2, self.dim - turns.size(-1)), -1)
        return torch.cat((left * cosines - right * sines, right * cosines + left * sines, plain), -1)


class BlockIndexer(Indexer):
    """Selects blocks of neighbouring keys, by the best key of each block. Each head does so for its query heads alone.

    Blocks are counted from the first token of a row. A query always sees the block that it is in, and maybe some blocks
    before it. Scores of heads are not weighted.
    """

    def __init__(self, config: TransformerConfig, tp_rank: int) -> None:
        super().__init__(config)
        own: Any = config
        self.block, self.num_local = own.dsa_indexer_block, own.dsa_indexer_local_blocks
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        group = config.num_attention_heads // self.heads
        self.head_of = [head // group for head in range(tp_rank * heads, (tp_rank + 1) * heads)]
        self.linear_wq = ReplicatedLinear(config.hidden_size, self.heads * self.dim, config)
        self.linear_wk = ReplicatedLinear(config.hidden_size, self.dim, config)
        self.q_norm, self.k_norm = (Norm(config, self.dim, config.layernorm_epsilon) for _ in range(2))
        self.requires_grad_(False)

    def _parts(self, hidden: Tensor, latent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query = self.linear_wq(latent)[0].unflatten(-1, (self.heads, self.dim))
        return self.q_norm(query).flatten(-2), self.k_norm(self.linear_wk(hidden)[0]), hidden[..., :0]

    def selected(self, query: Tensor, key: Tensor, weights: Tensor, hidden: Tensor, places: Places) -> Tensor:
        """As in the base class, for each head of this TP rank."""
        offsets = torch.arange(key.size(0), device=key.device) - places.first[:, None]
        block_of = offsets.clamp(min=0).div(self.block, rounding_mode="floor")[:, None].expand(-1, query.size(0), -1)
        own = (places.queries - places.first[:, None]).div(self.block, rounding_mode="floor")[..., None]
        local = (own - torch.arange(self.num_local, device=key.device)).clamp(min=0)
        of_head = {}
        for head in set(self.head_of):  # one by one, to keep the scores of one in memory
            scores = (query[:, :, head].float().transpose(0, 1) @ key.float().permute(1, 2, 0)).masked_fill(
                hidden, float("-inf")
            )
            blocks = scores.new_full((*scores.shape[:2], -(-key.size(0) // self.block)), float("-inf"))
            blocks = blocks.scatter_reduce(-1, block_of, scores, "amax").scatter(-1, local, float("inf"))
            of_head[head] = best(blocks, self.num_selected).gather(-1, block_of)
        return torch.stack([of_head[head] for head in self.head_of], 1)


def best(scores: Tensor, count: int) -> Tensor:
    """True for the ``count`` largest scores in the last dim, or for all scores if there are fewer."""
    largest = scores.topk(min(count, scores.size(-1)), -1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, largest, True)


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


def indexer_of(config: Any, tp_rank: int) -> Indexer:
    """The indexer of a layer. In transformers, each kind has an epsilon of its own."""
    pools = getattr(config, "dsa_indexer_pool", None)
    if not config.multi_latent_attention:
        return MeanPoolIndexer(config) if pools else BlockIndexer(config, tp_rank)
    if pools:
        return GatedPoolIndexer(config, 1e-6)
    return TokenIndexer(config, config.layernorm_epsilon)


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
            groups = arguments.get("pg_collection")
            group = parallel_state.get_tensor_model_parallel_group() if groups is None else groups.tp
            self.indexer = indexer_of(config, group.rank())
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
        """``[b, 1 or heads, s, t]``, True for keys of later tokens, of padding, and keys that are not selected."""
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
        return hidden | ~self.indexer.selected(query, keys, weights, whole, where)

    def _attended(self, tensors: tuple[Tensor, Tensor, Tensor], hidden: Tensor) -> Tensor:
        query, key, value = tensors
        if self.cp_group.size() > 1:
            key, value = self._gather(key, value)
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        with self._rng():
            context = self._attend(query, key, value, hidden)
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
            has_rope = self.config.qk_pos_emb_head_dim
            rotate = self._rotation(hidden_states, packed_seq_params) if has_rope else None
            with torch.no_grad():
                self.core_attention.indexed = self.core_attention.indexer(hidden_states, tensors[3], rotate)
        return tensors

    def _rotation(self, hidden: Tensor, packed: Any) -> Any:
        """A function that rotates the last dims of ``[s, b, heads, dim]`` as keys are rotated, but in halves."""
        length = self.rotary_pos_emb.get_rotary_seq_len(None, None, hidden, self.config, packed)
        angles, factor = self.rotary_pos_emb(length, packed_seq=packed is not None)
        rotated: int = self.config.qk_pos_emb_head_dim

        def rotate(heads: Tensor) -> Tensor:
            whole = packed is None or self.config.context_parallel_size == 1
            own = angles[: heads.size(0)] if whole else angles
            plain, turned = heads.split((heads.size(-1) - rotated, rotated), -1)
            return torch.cat((plain, in_halves(turned, own, packed, factor, self.pg_collection.cp)), -1)

        return rotate


class SelectingGroups(nn.Module):
    """Attention whose core attention gets what an indexer computes from its input. It has the rope of attention."""

    config: Any
    core_attention: Any
    pg_collection: Any

    def forward(
        self, hidden_states: Tensor, *inputs: Any, rotary_pos_emb: Any, packed_seq_params: Any = None, **options: Any
    ) -> Any:
        """The output of attention ``[s, b, h]`` and its bias, from ``[s, b, h]``."""
        angles = rotary_pos_emb[0] if isinstance(rotary_pos_emb, tuple) else rotary_pos_emb
        factor = _yarn_get_concentration_factor_from_config(self.config)
        rotate = Turn(angles, packed_seq_params, factor, self.pg_collection.cp)
        core = self.core_attention
        with torch.no_grad():
            core.indexed = core.indexer(hidden_states, hidden_states, rotate)
        options |= {"rotary_pos_emb": rotary_pos_emb, "packed_seq_params": packed_seq_params}
        return super().forward(hidden_states, *inputs, **options)


class Turn(NamedTuple):
    """The rope of attention, for heads ``[s, b, heads, dim]`` of an indexer (see ``in_halves``)."""

    angles: Tensor
    packed: Any
    factor: float
    cp_group: Any

    def __call__(self, heads: Tensor) -> Tensor:
        return in_halves(heads, *self)


def in_halves(heads: Tensor, angles: Tensor, packed: Any, factor: float, cp_group: Any) -> Tensor:
    """Rotates the first dims of ``[s, b, heads, dim]``, as many as there are angles, in two halves."""
    starts = None
    if packed is not None:
        starts = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
        heads = heads.squeeze(1)
    options = {"config": _HALVES, "cu_seqlens": starts, "mscale": factor, "cp_group": cp_group}
    turned: Tensor = apply_rotary_pos_emb(heads, angles, **options)
    return turned if packed is None else turned.unsqueeze(1)
