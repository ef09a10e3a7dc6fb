"""Gemma: zero-centred norms, scaled embeddings, and a gated MLP with GELU."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Ignore
from mcore_bridge.config.tables import GEMMA, QK_PLAIN, WINDOW_NONE
from mcore_bridge.models.blocks import GQA, NORMS, O_BIAS, QKV_BIAS, SWIGLU, decoder

ARCHITECTURE = Architecture(
    model_type="gemma",
    fields=(*GEMMA, *WINDOW_NONE, *QK_PLAIN, Ignore("transformers reads hidden_act", ("hidden_activation",))),
    rules=lambda hf: decoder(NORMS, GQA, QKV_BIAS, O_BIAS, SWIGLU),
)
