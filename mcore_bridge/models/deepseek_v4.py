"""DeepSeek V4: residual streams, attention to windows and compressed keys, and experts that tokens choose at first.

Names in files are those of publishers, which engines read. transformers reads them, too, but writes others.
"""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.tables.compressed import COMPRESSED
from mcore_bridge.models import blocks_compressed as blocks
from mcore_bridge.models.blocks_sparse import merge, streams
from mcore_bridge.rules.mapping import respelled, second_names, under

ATTENTION = (*blocks.ATTENTION, *blocks.COMPRESSOR, *blocks.INDEXER)
LAYER = (blocks.NORMS, ATTENTION, blocks.EXPERTS, streams("hc_attn_", "hc_ffn_"))
WRITTEN = (
    ("layers.*.attn.kv_norm.", "model.layers.*.attn.norm."),
    *(("layers.", "model.layers."), ("hc_head_", "model.hc_head.hc_")),
    *(("embed.", "model.embed_tokens."), ("norm.", "model.norm.")),
)
"""Beginnings of names of publishers, each with what transformers writes."""
RULES = (*blocks.AROUND, *merge("hc_head_"), *under("decoder.layers.*", "layers.*", *LAYER))
ARCHITECTURE = Architecture(
    model_type="deepseek_v4",
    aliases=("deepseek_ref",),
    reads_as="deepseek_v4",
    fields=COMPRESSED,
    rules=lambda hf: (*RULES, *second_names(respelled(RULES, WRITTEN))),
    mtp=lambda hf: ("mtp.*",),
    renamed_in_memory=blocks.IN_MEMORY,
)
