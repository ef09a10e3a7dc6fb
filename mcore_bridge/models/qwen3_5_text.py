"""Qwen3.5, its text: linear attention by the gated delta rule in most layers, gated full attention in the others."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.tables import BIAS_ATTENTION, DELTA_NET, DENSE, QK_NORMED, WINDOW_NONE, ZERO_CENTERED, but
from mcore_bridge.models.blocks import DELTA_IN, GATED_BIAS, GATED_GQA, NORMS, O_BIAS, QK_NORM, SWIGLU, decoder
from mcore_bridge.models.blocks import DELTA_NET as DELTA

ARCHITECTURE = Architecture(
    model_type="qwen3_5_text",
    fields=(*but(DENSE, *ZERO_CENTERED), *BIAS_ATTENTION, *WINDOW_NONE, *QK_NORMED, *DELTA_NET),
    rules=lambda hf: decoder(NORMS, GATED_GQA, GATED_BIAS, O_BIAS, QK_NORM, DELTA, DELTA_IN, SWIGLU),
    ignored=("*.rotary_emb.inv_freq", "mtp.*", "model.visual.*"),
)
