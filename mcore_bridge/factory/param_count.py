"""Counts the parameters of an HF model from its config, without building the model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from mcore_bridge.architecture import architecture_of
from mcore_bridge.config.layer_kinds import (
    SECOND,
    inner_config,
    layer_config,
    layers_but_full,
    layers_of,
    shares_selection,
    value_channels,
)
from mcore_bridge.config.mesh.balance import balanced
from mcore_bridge.config.mesh.parallel_dims import ParallelDims
from mcore_bridge.config.tables.derived import xielu
from mcore_bridge.config.transformer import to_transformer_config
from mcore_bridge.rules.spec import TensorSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, slots=True)
class ParamCounts:
    """Numbers of parameters: of each layer, of the embedding, of the LM head (0 if tied) and of the rest.

    ``experts`` counts parameters of routed experts in each layer; ``layers`` includes them. ``tower`` counts parameters
    of a composite's tower, which tensor parallelism does not cut.
    """

    layers: tuple[int, ...]
    experts: tuple[int, ...]
    embedding: int
    lm_head: int
    rest: int
    tower: int = 0

    @property
    def total(self) -> int:
        """The number of parameters of the whole model. Tied parameters count once."""
        return sum(self.layers) + self.embedding + self.lm_head + self.rest + self.tower


def count_params(hf: PretrainedConfig, *, tower: Iterable[TensorSpec] = ()) -> ParamCounts:
    """Counts the parameters of the ``GPTModel`` of ``hf``, without modules that an architecture's own spec adds.

    Args:
        hf: the HF config of a model of text.
        tower: the tensors of the tower that goes with it.

    Raises:
        ConfigError: megatron-core cannot express this config.
    """
    config: Any = to_transformer_config(hf, architecture_of(hf).fields)
    layers, experts = _layers(config)
    vocabulary = config.hf_vocab_size * config.hidden_size
    lm_head = 0 if hf.tie_word_embeddings else vocabulary
    inputs = (size := getattr(config, "layer_input_size", None) or 0) * config.num_layers
    vocabulary += inputs * (config.hf_vocab_size + config.hidden_size) + size
    lm_head += config.hf_vocab_size * getattr(config, "output_layer_bias", False)
    numel = sum(spec.numel for spec in tower)
    last = _norm(config, config.hidden_size) * (getattr(config, "embedding_norm", None) == "weighted")
    return ParamCounts(layers, experts, vocabulary, lm_head, last + _final_norm(config), numel)


def count_inner(hf: PretrainedConfig) -> tuple[int, int]:
    """The numbers of parameters of the layer within an MTP layer, and of its routed experts."""
    layers, experts = _layers(inner_config(to_transformer_config(hf, architecture_of(hf).fields)))
    return layers[-1], experts[-1]


def _layers(config: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The numbers of parameters of each layer, and of its routed experts."""
    sparse = layers_of(vars(config)) if config.num_moe_experts else [0] * config.num_layers
    routed = config.num_moe_experts * _expert(config) if any(sparse) else 0
    experts = [is_sparse * routed for is_sparse in sparse]
    own = [layer_config(config, layer) for layer in range(config.num_layers)]
    mlps = [
        size + _around_experts(config) if size else _mlp(config, config.ffn_hidden_size) + _numbers(config)
        for size, config in zip(experts, own, strict=True)
    ]
    linear = layers_but_full(vars(config), "linear_attention_freq", unset=0)
    attentions = [
        _linear_attention(config) if is_linear else _attention(own[layer], layer)
        for layer, is_linear in enumerate(linear)
    ]
    attentions = [size + _ngrams(config) for size, config in zip(attentions, own, strict=True)]
    halves = zip(attentions, mlps, strict=True)
    kinds = getattr(config, "layer_kinds", None)
    layers = (
        _norms(config) + attention + mlp if kinds is None else _halves(config, kinds[layer], attention, mlp)
        for layer, (attention, mlp) in enumerate(halves)
    )
    return tuple(layers), tuple(experts)


def _linear(inputs: int, outputs: int, *, bias: bool) -> int:
    return inputs * outputs + outputs * bias


def _halves(config: Any, kinds: str, attention: int, mlp: int) -> int:
    """The parameters of a layer that may have one half only, with a norm before each, or also after it."""
    first = sum(count(config) for letter, count in _MIXERS.items() if letter in kinds) + attention * ("*" in kinds)
    second = 0 if SECOND.isdisjoint(kinds) else mlp
    around = 2 if getattr(config, "norm_placement", "pre") == "sandwich" else 1
    norms = _norm(config, config.hidden_size) * around * ((first > 0) + (second > 0))
    return first + second + norms + _connections(config)


def _norm(config: Any, size: int) -> int:
    if not getattr(config, "norm_weight", True):
        return 0
    return size * (2 if config.normalization == "LayerNorm" and getattr(config, "norm_bias", True) else 1)


def _norms(config: Any) -> int:
    """The norms of a layer, without the norms of queries, keys and latents, and the scale of its output."""
    count = 4 if getattr(config, "norm_placement", "pre") == "sandwich" else 2 * (_low_rank_merge(config) == 0)
    norms = _norm(config, config.hidden_size) * (getattr(config, "parallel_norms", None) or count)
    of_input = 2 * config.hidden_size * (size := getattr(config, "layer_input_size", None) or 0)
    norms += of_input + config.hidden_size * bool(size)
    if getattr(config, "residual_convolutions", False):
        norms += 2 * config.hidden_size * config.short_conv_kernel
    return norms + getattr(config, "layer_scalar", False) + _connections(config)


def _final_norm(config: Any) -> int:
    """The parameters of the final norm, and of what makes one hidden state of residual streams before it."""
    if low_rank := _low_rank_merge(config):
        return low_rank
    merge = 0 if getattr(config, "mhc_merges_evenly", False) else _gates_of_streams(config, 1, 1)
    return merge + _norm(config, config.hidden_size)


def _low_rank_merge(config: Any) -> int:
    """The parameters of gates of low rank, and of the norms of the streams that they multiply; 0 without such gates."""
    streams: int = getattr(config, "mhc_num_residual_streams", 0)
    rank: int | None = getattr(config, "mhc_rank", None)
    return 0 if rank is None else streams * config.hidden_size * (1 + 2 * rank)


def _connections(config: Any) -> int:
    """The parameters of the gates by which a layer reads and writes residual streams."""
    if low_rank := _low_rank_merge(config):
        return 2 * (low_rank + config.mhc_num_residual_streams**2 * config.hidden_size)
    if getattr(config, "mhc_sinkhorn_iterations", 0):
        return 2 * _gates_of_streams(config, 2 + config.mhc_num_residual_streams, 3)
    return 2 * _gates_of_streams(config, 2, 2)


def _gates_of_streams(config: Any, per_stream: int, kinds: int) -> int:
    """The parameters of gates of residual streams: so many for each stream, of so many kinds."""
    streams: int = getattr(config, "mhc_num_residual_streams", 0)
    return per_stream * streams * (streams * config.hidden_size + 1) + kinds * (streams > 0)


def _expert(config: Any) -> int:
    return _mlp(config, config.moe_ffn_hidden_size, hidden=getattr(config, "expert_latent_size", None))


def _mlp(config: Any, size: int, *, hidden: int | None = None) -> int:
    hidden, bias = hidden or config.hidden_size, config.add_bias_linear
    return _linear(hidden, size * (1 + config.gated_linear_unit), bias=bias) + _linear(size, hidden, bias=bias)


def _numbers(config: Any) -> int:
    """Single numbers of an MLP that the checkpoint has: of an activation, trained or not, and a scale of its output."""
    return 4 * (config.activation_func is xielu) + getattr(config, "residual_convolutions", False)


def _around_experts(config: Any) -> int:
    """The parameters of the router, of shared experts, of norms and of projections around all experts."""
    num_experts, shared = config.num_moe_experts, config.moe_shared_expert_intermediate_size
    router = _linear(config.hidden_size, num_experts, bias=config.add_bias_linear)
    by_token = getattr(config, "experts_by_token", False)  # a table in the place of the bias
    biases = config.hf_vocab_size * config.moe_router_topk if by_token else num_experts
    router += biases * config.moe_router_enable_expert_bias
    router += _norm(config, config.hidden_size) * getattr(config, "expert_norm", False)
    router += 3 * _norm(config, config.hidden_size) * getattr(config, "experts_beside_mlp", False)
    router += (config.hidden_size + num_experts) * getattr(config, "router_scales", False)
    router += 2 * config.hidden_size * (getattr(config, "expert_latent_size", None) or 0)
    if not shared:
        return router
    if getattr(config, "shared_experts_scored", False):
        router += config.hidden_size * (shared // config.moe_ffn_hidden_size) + 1
    return router + _mlp(config, shared) + config.hidden_size * config.moe_shared_expert_gate


def _attention(config: Any, layer: int) -> int:
    hidden, dim = config.hidden_size, config.kv_channels
    if getattr(config, "compression_ratios", None) is not None:
        return _compressed_attention(config)
    heads, groups = config.num_attention_heads, config.num_query_groups
    dim_of_values = config.v_head_dim if config.multi_latent_attention else dim or 0
    gates = {None: 0, "head": heads, "element": heads * dim_of_values}[getattr(config, "attention_gate", None)]
    sinks = heads * (config.softmax_type == "learnable")
    if config.multi_latent_attention:
        return _latent_attention(config) + hidden * gates + _indexer(config, layer) + sinks
    values = value_channels(vars(config))
    qkv = dim * (heads * (1 + config.attention_output_gate) + groups) + values * groups
    if reads := getattr(config, "keys_of_layer", None) not in (None, layer):  # it projects queries alone
        qkv = dim * heads
    bias = config.add_bias_linear
    count = _linear(hidden, qkv, bias=bias or config.add_qkv_bias)
    count += _linear(heads * (values or dim), hidden, bias=bias or getattr(config, "attention_output_bias", False))
    count += hidden * gates + _beside_scores(config) + _indexer(config, layer)
    kind = getattr(config, "qk_norm_kind", "head")
    if reads:
        return count + _norm(config, dim)
    if config.qk_layernorm and kind != "unweighted":
        together = kind in ("all_heads", "each_head")
        count += _norm(config, dim * (heads + groups if together else 2))
    return count + sinks


def _compressed_attention(config: Any) -> int:
    """The parameters of attention to windows, and to compressed keys."""
    hidden, dim, heads, rank = config.hidden_size, config.kv_channels, config.num_attention_heads, config.query_rank
    count = (hidden + 1 + heads * dim) * rank + (hidden + 1) * dim + heads
    count += (heads * dim + config.output_groups * hidden) * config.output_rank
    own, indexers = config.dsa_indexer_head_dim, config.dsa_indexer_n_heads
    if config.compression is not None:
        count += _compressor(config, dim)
    if config.compression == "selected":
        count += indexers * (rank * own + hidden) + _compressor(config, own)
    return int(count)


def _compressor(config: Any, dim: int) -> int:
    width = dim * (1 + (config.compression == "selected"))
    return int((2 * config.hidden_size + config.compression_ratios[config.compression]) * width + dim)


def _beside_scores(config: Any) -> int:
    """The parameters of scores by distance, and of convolutions of keys and values."""
    profiles = getattr(config, "relative_profiles", None) or 0
    count = profiles * (config.hidden_size * config.num_attention_heads + getattr(config, "relative_extent", 0))
    if getattr(config, "residual_convolutions", False):
        count += 2 * config.num_query_groups * config.kv_channels * config.short_conv_kernel
    return int(count)


def _latent_attention(config: Any) -> int:
    hidden, heads, rank, low = config.hidden_size, config.num_attention_heads, config.q_lora_rank, config.kv_lora_rank
    plain, rotated, value = config.qk_head_dim, config.qk_pos_emb_head_dim, config.v_head_dim
    query = heads * (plain + rotated)
    queries = hidden * query if rank is None else (hidden + query + 1) * rank
    return queries + hidden * (low + rotated) + (heads * (plain + value) + 1) * low + heads * value * hidden


def _indexer(config: Any, layer: int) -> int:
    """The parameters of the indexer of a layer, if it has one."""
    if config.dsa_indexer_topk is None:
        return 0
    if shares_selection(layer, freq=config.dsa_indexer_topk_freq, offset=config.dsa_indexer_skip_topk_offset):
        return 0
    heads, dim = config.dsa_indexer_n_heads, config.dsa_indexer_head_dim
    if not config.multi_latent_attention:
        return config.hidden_size * (heads + 1) * dim + 2 * dim  # also of pools, whose keys are means
    pool = getattr(config, "dsa_indexer_pool", None)
    pooling = dim * (config.hidden_size + pool) if pool else 0
    return config.q_lora_rank * heads * dim + config.hidden_size * (dim + heads) + 2 * dim + pooling


def _ngrams(config: Any) -> int:
    """The parameters of the embeddings of n-grams that a layer adds to its streams, with the integers of its hashes."""
    number = getattr(config, "ngram_layer", None)
    if number is None:
        return 0
    ngrams, hidden, streams = config.ngrams, config.hidden_size, config.mhc_num_residual_streams
    heads = len(ngrams.rows_of_heads(number))
    count = ngrams.rows(number) * (ngrams.width // heads) + ngrams.size + 2 * heads
    return int(count + ngrams.width * hidden * (streams + 1) + streams * hidden * (3 + ngrams.kernel))


def _linear_attention(config: Any) -> int:
    """The parameters of linear attention (the gated delta rule)."""
    heads, dim = config.linear_num_value_heads, config.linear_value_head_dim
    qkv = 2 * config.linear_num_key_heads * config.linear_key_head_dim + heads * dim
    count = config.hidden_size * (qkv + heads * dim + 2 * heads) + qkv * config.linear_conv_kernel_dim
    return int(count + 2 * heads + dim + heads * dim * config.hidden_size)


def _mamba(config: Any) -> int:
    """The parameters of a Mamba-2 mixer: projections, convolution, gated norm, and three numbers for each head."""
    inner, heads = config.mamba_num_heads * config.mamba_head_dim, config.mamba_num_heads
    convolved = inner + 2 * config.mamba_num_groups * config.mamba_state_dim
    count = config.hidden_size * (2 * inner + convolved + heads) + (config.mamba_conv_kernel + 1) * convolved
    return int(count + 3 * heads + inner * getattr(config, "mamba_norm", True))


def _short_conv(config: Any) -> int:
    """The parameters of a short convolution, and of the projections to three numbers for each channel and back."""
    return int(config.hidden_size * (4 * config.hidden_size + config.short_conv_kernel))


def _kda(config: Any) -> int:
    """The parameters of Kimi delta attention: projections, convolution, decay, and a norm of heads."""
    heads, dim = config.linear_num_key_heads, config.linear_key_head_dim
    inner = heads * dim
    of_gates = inner * config.hidden_size if config.kda_full_rank else dim * (config.hidden_size + inner)
    wide = inner * (4 * config.hidden_size + 3 * config.linear_conv_kernel_dim + 1)
    return int(wide + 2 * of_gates + heads * (config.hidden_size + 1) + dim)


_MIXERS = {"M": _mamba, "C": _short_conv, "K": _kda}
"""The counts of mixers in the place of attention, by their letters in ``layer_kinds``."""


def resolve_layout(
    dims: ParallelDims,
    hf: PretrainedConfig,
    *,
    dtype: torch.dtype,
    head: str = "lm",
    mtp: tuple[int, int] = (0, 0),
    tower: Iterable[TensorSpec] = (),
    at_first: int = 0,
) -> ParallelDims:
    """``dims`` with ``layout="balanced"`` replaced by the explicit layout that balances the bytes of the ranks.

    A rank holds ``1 / (ep * etp)`` of the routed experts, the whole tower, and about ``1 / tp`` of all other
    parameters.

    Args:
        dims: the mesh. It is returned unchanged if its layout is not "balanced".
        hf: the HF config.
        dtype: the dtype of the parameters.
        head: with "lm", the last stage also holds the output matrix, or a copy of the embedding if tied.
        mtp: how many tokens MTP layers predict, and by how many layers. They go to the last stage, with a copy of the
            embedding.
        tower: the tensors of the tower, which is on the first stage.
        at_first: how many of the first layers must be on one stage, if there are enough other layers.
    """
    if dims.layout != "balanced":
        return dims
    counted = count_params(hf, tower=tower)
    dense = dims.ep * dims.etp * dtype.itemsize  # bytes per parameter on a rank, in units of 1 / (tp * ep * etp)
    routed = dims.tp * dtype.itemsize

    def size(layer: int, experts: int) -> int:
        return (layer - experts) * dense + experts * routed

    layers = [size(*counts) for counts in zip(counted.layers, counted.experts, strict=True)]
    loss = (counted.rest + (counted.embedding if head == "lm" else 0)) * dense
    predictions, held = mtp
    if predictions:
        loss += held * (size(*count_inner(hf)) + 2 * hf.hidden_size**2 * dense) + counted.embedding * dense
    first = (counted.embedding + counted.tower * dims.tp) * dense
    # the first layers are balanced as one layer, which is in the first stage
    together = max(min(at_first, len(layers)), 1)
    layers[:together] = [sum(layers[:together])]
    result = balanced(dims, layer_bytes=layers, embedding_bytes=first, loss_bytes=loss)
    if result.layout is None:  # one pipeline rank holds all
        return result
    layout = result.layout.removesuffix("L").replace("t", "t" * together, 1)
    return replace(result, layout=f"{layout}{'m' * predictions}L")
