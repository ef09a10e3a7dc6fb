"""Phi-3, Phi-3.5 and Phi-4 (mini too): fused projections, a part of each head rotated, longrope, a window."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Require
from mcore_bridge.config.tables import BIAS_NONE, DENSE, QK_PLAIN, WINDOW_ALL, but, dropout, unread
from mcore_bridge.config.tables.derived_rope import rope
from mcore_bridge.models.blocks import FUSED_GLU, FUSED_GQA, NORMS, decoder

ROPE = rope(types=("default", "longrope"), own=("partial_rotary_factor",))
BIASES = ("attention_bias", "mlp_bias", "lm_head_bias")
NO_BIAS = (*BIAS_NONE, *(Require(name, (False,), "the model has none in transformers") for name in BIASES))
UNREAD = unread("embd_pdrop", "full_attn_mod", "interpolate_factor")
ARCHITECTURE = Architecture(
    model_type="phi3",
    fields=(*but(DENSE, *dropout("resid_pdrop"), ROPE), *NO_BIAS, *WINDOW_ALL, *QK_PLAIN, UNREAD),
    rules=lambda hf: decoder(NORMS, FUSED_GQA, FUSED_GLU),
)
