"""Qwen3: norms of queries and keys in each head, and a window in some layers."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.tables import BIAS_ATTENTION, DENSE, QK_NORMED, WINDOW_BY_LAYER
from mcore_bridge.models.blocks import GQA, NORMS, O_BIAS, QK_NORM, QKV_BIAS, SWIGLU, decoder

ARCHITECTURE = Architecture(
    model_type="qwen3",
    fields=(*DENSE, *BIAS_ATTENTION, *WINDOW_BY_LAYER, *QK_NORMED),
    rules=lambda hf: decoder(NORMS, GQA, QKV_BIAS, O_BIAS, QK_NORM, SWIGLU),
)
