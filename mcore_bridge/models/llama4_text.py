"""Llama 4, the text model: attention in chunks, layers without a rope, one routed expert whose input is scaled."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.tables import BIAS_ATTENTION, DECODER, INTERLEAVED, WINDOW_NEVER, but
from mcore_bridge.config.tables.chunked import CHUNKED, ON_INPUT, ROPE
from mcore_bridge.models.blocks import GATED_MLP, GQA, NORMS, O_BIAS, QKV_BIAS, decoder
from mcore_bridge.rules.layout import REPLICATED
from mcore_bridge.rules.mapping import experts, table, under

# fmt: off
MLP = (*under("mlp",                "feed_forward",               GATED_MLP),
       *under("mlp.shared_experts", "feed_forward.shared_expert", GATED_MLP),
       *experts("mlp.experts.*",    "feed_forward.experts.*",     GATED_MLP, turned=True),
       *table(("mlp.router.weight", "feed_forward.router.weight", REPLICATED)))
# fmt: on
ARCHITECTURE = Architecture(
    model_type="llama4_text",
    fields=(*but(DECODER, *INTERLEAVED, ROPE, *ON_INPUT), *BIAS_ATTENTION, *WINDOW_NEVER, *CHUNKED),
    dialect="fused",
    swapped_in_peft=True,
    rules=lambda hf: decoder(NORMS, GQA, QKV_BIAS, O_BIAS, MLP),
)
