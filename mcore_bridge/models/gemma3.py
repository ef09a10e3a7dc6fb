"""Gemma 3, the text model: a Gemma 2 with norms of queries and keys, and another rope for sliding layers."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Require
from mcore_bridge.config.tables import GEMMA2, QK_NORMED, but
from mcore_bridge.config.tables.derived_rope import LAYER_ROPES
from mcore_bridge.models.blocks import GQA, NORMS_FOUR, O_BIAS, QK_NORM, QKV_BIAS, SWIGLU, decoder

ARCHITECTURE = Architecture(
    model_type="gemma3_text",
    fields=(
        *but(GEMMA2, LAYER_ROPES),
        *QK_NORMED,
        Require("attn_logit_softcapping", (None,), "the attention of transformers drops it"),
    ),
    rules=lambda hf: decoder(NORMS_FOUR, GQA, QKV_BIAS, O_BIAS, QK_NORM, SWIGLU),
)
