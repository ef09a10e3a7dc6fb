"""Qwen3.5 (dense), its text: linear attention by the gated delta rule in most layers, gated full attention in others."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.tables import DENSE, but
from mcore_bridge.config.tables_delta import DELTA, NO_MIXED_MLP
from mcore_bridge.models.blocks import SWIGLU, decoder
from mcore_bridge.models.blocks_delta import DELTA_IN, DELTA_LAYER

ARCHITECTURE = Architecture(
    model_type="qwen3_5_text",
    fields=(*but(DENSE, *DELTA), NO_MIXED_MLP),
    rules=lambda hf: decoder(DELTA_LAYER, DELTA_IN, SWIGLU),
    ignored=("mtp.*",),
)
