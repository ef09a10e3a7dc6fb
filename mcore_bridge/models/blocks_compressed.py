"""Shared tables of attention to compressed keys. Every TP rank holds all keys, compressors and indexers whole."""

from mcore_bridge.rules.layout import COLUMN, REPLICATED, ROW
from mcore_bridge.rules.mapping import Rules, table, under

# fmt: off
ATTENTION  = under("self_attention", "attn", table(
                   ("linear_q_down_proj.weight",      "wq_a.weight",    REPLICATED),
                   ("q_layernorm.weight",             "q_norm.weight",  REPLICATED),
                   ("linear_q_up_proj.weight",        "wq_b.weight",    COLUMN),
                   ("linear_kv_proj.weight",          "wkv.weight",     REPLICATED),
                   ("kv_layernorm.weight",            "kv_norm.weight", REPLICATED),
                   ("core_attention.softmax_offset",  "attn_sink",      COLUMN),
                   ("linear_o_down_proj.weight",      "wo_a.weight",    COLUMN),
                   ("linear_proj.weight",             "wo_b.weight",    ROW)))
PARTS      = table(("linear_kv.weight",               "wkv.weight",     REPLICATED),
                   ("linear_gate.weight",             "wgate.weight",   REPLICATED),
                   ("places",                         "ape",            REPLICATED),
                   ("norm.weight",                    "norm.weight",    REPLICATED))
COMPRESSOR = under("self_attention.compressor",         "attn.compressor",         PARTS)
INDEXER    = (*under("self_attention.indexer.compressor", "attn.indexer.compressor", PARTS),
              *under("self_attention.indexer", "attn.indexer", table(
                   ("linear_wq_b.weight",             "wq_b.weight",         REPLICATED),
                   ("linear_weights_proj.weight",     "weights_proj.weight", REPLICATED))))
# fmt: on
KINDS: dict[str, Rules] = {
    "compressed_sparse_attention": (*COMPRESSOR, *INDEXER),
    "heavily_compressed_attention": COMPRESSOR,
}
"""The modules of layers that compress keys, by their kinds in ``layer_types``."""
