"""Shared tables of latent attention with an indexer, and of residual streams. Every TP rank holds both whole."""

from dataclasses import replace

from mcore_bridge.config.fields import Hf
from mcore_bridge.config.tables.ngrams import layers_with_ngrams, ngrams_of
from mcore_bridge.models.blocks import MLA, MOE_BIASED, NORMS
from mcore_bridge.rules.layout import COLUMN, REPLICATED, Concat
from mcore_bridge.rules.mapping import Rule, Rules, of_layers, table, under
from mcore_bridge.rules.mixer_layouts import HALVES_OF_KEYS, HALVES_OF_QUERIES

# fmt: off
INDEXER      = under("self_attention.core_attention.indexer", "self_attn.indexer", table(
                     ("linear_wq_b.weight",         "wq_b.weight",         REPLICATED),
                     ("linear_wk.weight",           "wk.weight",           REPLICATED),
                     ("k_norm.weight",              "k_norm.weight",       REPLICATED),
                     ("k_norm.bias",                "k_norm.bias",         REPLICATED),
                     ("linear_weights_proj.weight", "weights_proj.weight", REPLICATED)))
POOLS        = under("self_attention.core_attention.indexer", "self_attn.indexer", table(
                     ("pool_places",             "index_kpool_compress_ape",  REPLICATED),
                     ("linear_pool_gate.weight", "index_kpool_compress_gate", REPLICATED)))
BLOCKS       = under("self_attention.core_attention.indexer", "self_attn", table(
                     ("linear_wq.weight", "index_q_proj.weight", REPLICATED),
                     ("linear_wk.weight", "index_k_proj.weight", REPLICATED),
                     ("q_norm.weight",    "index_q_norm.weight", REPLICATED),
                     ("k_norm.weight",    "index_k_norm.weight", REPLICATED)))
MEAN_POOLS   = under("self_attention.core_attention.indexer", "self_attn.indexer", table(
                     ("linear_wqk.weight", "index_qk_proj.weight", REPLICATED),
                     ("q_norm.weight",     "q_layernorm.weight",   REPLICATED),
                     ("k_norm.weight",     "k_layernorm.weight",   REPLICATED)))
_LOW_RANK    = table(("norm.weight",         "hc_norm.weight",               REPLICATED),
                     ("linear_down.weight",  "input_mix_weight_down.weight", REPLICATED),
                     ("linear_up.weight",    "input_mix_weight_up.weight",   REPLICATED))
_WRITE       = table(("linear_write.weight", "block_inject_weight.weight",   REPLICATED))
_NGRAMS      = table(("multipliers",         "ple_embedding.layer_multipliers",       REPLICATED),
                     ("rows_of_heads",       "ple_embedding.ngram_heads_vocab_sizes", REPLICATED),
                     ("starts_of_heads",     "ple_embedding.ngram_heads_offsets",     REPLICATED),
                     ("linear_key.weight",   "key_proj.weight",                       REPLICATED),
                     ("linear_value.weight", "value_proj.weight",                     REPLICATED),
                     ("key_norm.weight",     "norm_key.weight",                       REPLICATED),
                     ("query_norm.weight",   "norm_query.weight",                     REPLICATED),
                     ("conv_norm.weight",    "norm_conv.weight",                      REPLICATED),
                     ("conv.weight",         "conv1d.weight",                         REPLICATED))
SPARSE_LAYER = (*NORMS, *MLA, *INDEXER, *MOE_BIASED)
# fmt: on
"""``SPARSE_LAYER`` has no dense MLP. Layers that share a selection have no indexer. ``POOLS`` joins keys into pools.
``BLOCKS`` and ``MEAN_POOLS`` are indexers without latents."""
LOW_RANK_STREAMS = (
    *under("input_layernorm.connection", "attn_hyper_connection", _LOW_RANK, _WRITE),
    *under("pre_mlp_layernorm.connection", "mlp_hyper_connection", _LOW_RANK, _WRITE),
)
LOW_RANK_MERGE = under("decoder.final_layernorm.merge", "model.hyper_connection_mixer", _LOW_RANK)
_HALVES = {"linear_q_up_proj": HALVES_OF_QUERIES, "linear_kv_down_proj": HALVES_OF_KEYS}
MLA_IN_HALVES = tuple(replace(rule, layout=_HALVES.get(rule.mcore.split(".")[1], rule.layout)) for rule in MLA)
"""``MLA`` of a checkpoint whose pairs of rotated dims are in two halves."""


def gates(mcore: str, hf: str) -> Rules:
    """The three tensors of the gates at ``mcore``, whose HF names begin with ``hf``."""
    return table(*((f"{mcore}.{name}", f"{hf}{name}", REPLICATED) for name in ("fn", "base", "scale")))


def streams(attention: str, mlp: str) -> Rules:
    """The gates of a layer, from the beginnings of their HF names."""
    return (*gates("input_layernorm.connection", attention), *gates("pre_mlp_layernorm.connection", mlp))


def merge(hf: str) -> Rules:
    """The gates before the final norm."""
    return gates("decoder.final_layernorm.merge", hf)


def ngrams(hf: Hf) -> Rules:
    """The embeddings of n-grams of some layers. Each layer has a table of its own size, and files have its shards."""
    layers, mcore, own = layers_with_ngrams(hf), "input_layernorm.ngrams", "ple.ple_embedding.ngram_embedding"
    rules = of_layers(under("decoder.layers.*", "model.layers.*", under(mcore, "ple", _NGRAMS)), layers)
    for number, layer in enumerate(layers):
        rows = ngrams_of(hf).rows_of_shards(number)
        names = tuple(f"model.layers.{layer}.{own}.shard_{shard}.weight" for shard in range(len(rows)))
        whole = f"decoder.layers.{layer}.{mcore}.word_embeddings.weight"
        rules = (*rules, Rule(whole, names, Concat(0, rows) >> COLUMN))
    return rules
