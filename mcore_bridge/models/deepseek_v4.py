"""DeepSeek V4: residual streams, attention to windows and compressed keys, and experts that tokens choose at first.

Names in files are those of publishers, which engines read. transformers reads them, too, but writes others.
"""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.tables.compressed_attention import COMPRESSED
from mcore_bridge.models.blocks import MLP_W123, mtp_numbered
from mcore_bridge.models.blocks_sparse import gates, merge, streams
from mcore_bridge.rules.layout import COLUMN, REPLICATED, ROW, VOCAB
from mcore_bridge.rules.mapping import Prefixes, experts, respelled, second_names, table, under

# fmt: off
AROUND     = table(("embedding.word_embeddings.weight", "embed.weight", VOCAB),
                   ("decoder.final_layernorm.weight",   "norm.weight",  REPLICATED),
                   ("output_layer.weight",              "head.weight",  VOCAB))
NORMS      = table(("input_layernorm.weight",         "attn_norm.weight", REPLICATED),
                   ("pre_mlp_layernorm.weight",       "ffn_norm.weight",  REPLICATED))
EXPERTS    = (*table(("mlp.router.weight",            "ffn.gate.weight",  REPLICATED),
                     ("mlp.router.expert_bias",       "ffn.gate.bias",    REPLICATED),
                     ("mlp.router.experts_of_tokens", "ffn.gate.tid2eid", REPLICATED)),
              *under("mlp.shared_experts",            "ffn.shared_experts", MLP_W123),
              *experts("mlp.experts.*",               "ffn.experts.*",      MLP_W123))
ATTENTION  = under("self_attention", "attn", table(
                   ("linear_q_down_proj.weight",      "wq_a.weight",    REPLICATED),
                   ("latent_layernorm.weight",        "q_norm.weight",  REPLICATED),
                   ("linear_q_up_proj.weight",        "wq_b.weight",    COLUMN),
                   ("linear_kv_down_proj.weight",     "wkv.weight",     REPLICATED),
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
AROUND_MTP = (*table(("e_proj.weight",                "e_proj.weight",   COLUMN),
                     ("h_proj.weight",                "h_proj.weight",   COLUMN),
                     ("enorm.weight",                 "enorm.weight",    REPLICATED),
                     ("hnorm.weight",                 "hnorm.weight",    REPLICATED),
                     ("final_layernorm.weight",       "norm.weight",     REPLICATED)),
              *gates("final_layernorm.merge",         "hc_head_"))
# fmt: on
W123_NAMES = {"w1": "gate", "w2": "down", "w3": "up"}
IN_MEMORY: Prefixes = (
    *(("layers.", "model.layers."), (".attn.", ".self_attn."), (".ffn.", ".mlp."), (".wgate", ".gate_proj")),
    *((".wq_a", ".q_a_proj"), (".wq_b", ".q_b_proj"), (".wkv", ".kv_proj"), (".wo_b", ".o_b_proj")),
    *((f".shared_experts.{own}", f".shared_experts.{name}_proj") for own, name in W123_NAMES.items()),
)
"""Parts of names of linear layers, each with its name in transformers' memory."""
STREAMS = streams("hc_attn_", "hc_ffn_")
LAYER = (NORMS, ATTENTION, COMPRESSOR, INDEXER, EXPERTS, STREAMS)
WRITTEN = (
    ("layers.*.attn.kv_norm.", "model.layers.*.attn.norm."),
    *(("layers.", "model.layers."), ("hc_head_", "model.hc_head.hc_")),
    *(("embed.", "model.embed_tokens."), ("norm.", "model.norm.")),
)
"""Beginnings of names of publishers, each with what transformers writes."""
RULES = (*AROUND, *merge("hc_head_"), *under("decoder.layers.*", "layers.*", *LAYER))
ARCHITECTURE = Architecture(
    model_type="deepseek_v4",
    aliases=("deepseek_ref",),
    reads_as="deepseek_v4",
    fields=COMPRESSED,
    rules=lambda hf: (
        *(*RULES, *second_names(respelled(RULES, WRITTEN))),
        *mtp_numbered(hf, "mtp.*", AROUND_MTP, NORMS, ATTENTION, EXPERTS, STREAMS),
    ),
    mtp=lambda hf: ("mtp.*",),  # copies of embedding and head, and the stages of DSpark
    renamed_in_memory=IN_MEMORY,
)
