"""Qwen3.5 (dense), the text model: linear attention in most layers, full attention with an output gate in others."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.tables import DENSE, but
from mcore_bridge.config.tables.linear_attention import DELTA, NO_MIXED_MLP
from mcore_bridge.models.blocks import SWIGLU, decoder, mtp_beside
from mcore_bridge.models.blocks_delta import DELTA_IN, DELTA_LAYER

ARCHITECTURE = Architecture(
    model_type="qwen3_5_text",
    fields=(*but(DENSE, *DELTA), NO_MIXED_MLP),
    rules=lambda hf: (*decoder(DELTA_LAYER, DELTA_IN, SWIGLU), *mtp_beside(DELTA_LAYER, SWIGLU)),
)
