"""Gemma 2: norms before and after attention and MLP, soft caps of scores and logits, a window in some layers."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.tables import GEMMA2, QK_PLAIN
from mcore_bridge.config.tables.scales import ATTENTION_SOFTCAP
from mcore_bridge.models.blocks import GQA, NORMS_FOUR, O_BIAS, QKV_BIAS, SWIGLU, decoder

ARCHITECTURE = Architecture(
    model_type="gemma2",
    fields=(*GEMMA2, *QK_PLAIN, ATTENTION_SOFTCAP),
    rules=lambda hf: decoder(NORMS_FOUR, GQA, QKV_BIAS, O_BIAS, SWIGLU),
)
