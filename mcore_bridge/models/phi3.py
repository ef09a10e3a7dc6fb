"""Phi-3, Phi-3.5 and Phi-4 (mini too): fused projections, a part of each head rotated, longrope, a window."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.derived_rope import rope
from mcore_bridge.config.fields import Ignore, Require
from mcore_bridge.config.tables import BIAS_NONE, DENSE, QK_PLAIN, WINDOW_ALL, but, dropout
from mcore_bridge.models.blocks import FUSED_GLU, FUSED_GQA, NORMS, decoder

ROPE = rope(types=("default", "longrope"), own=("partial_rotary_factor",))
NO_BIAS = tuple(
    Require(name, (False,), "the model has no bias") for name in ("attention_bias", "mlp_bias", "lm_head_bias")
)
UNREAD = Ignore("transformers does not read it", ("embd_pdrop", "full_attn_mod", "interpolate_factor"))
CODE = Ignore("the published code is what transformers has taken over", ("auto_map",))
ARCHITECTURE = Architecture(
    model_type="phi3",
    fields=(*but(DENSE, *dropout("resid_pdrop"), ROPE, CODE), *NO_BIAS, UNREAD, *BIAS_NONE, *WINDOW_ALL, *QK_PLAIN),
    rules=lambda hf: decoder(NORMS, FUSED_GQA, FUSED_GLU),
    ignored=("*.rotary_emb.inv_freq",),
)
