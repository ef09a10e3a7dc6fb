"""Qwen2 and Qwen2.5: biases of q, k and v, and a window in some layers."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.tables import BIAS_QKV, DENSE, QK_PLAIN, WINDOW_BY_LAYER
from mcore_bridge.models.blocks import GQA, NORMS, QKV_BIAS, SWIGLU, decoder

ARCHITECTURE = Architecture(
    model_type="qwen2",
    fields=(*DENSE, *BIAS_QKV, *WINDOW_BY_LAYER, *QK_PLAIN),
    rules=lambda hf: decoder(NORMS, GQA, QKV_BIAS, SWIGLU),
)
