"""LFM3: an LFM2 with windows in some layers, gates for heads of attention, and norms behind both halves of a layer."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.tables import DENSE, but
from mcore_bridge.config.tables.derived_rope import LAYER_ROPES_PROPORTIONAL
from mcore_bridge.config.tables.short_convolutions import CONVOLUTIONS_AND_WINDOWS
from mcore_bridge.models.blocks import EMBEDDING, GQA, HEAD_GATE, O_BIAS, QK_NORM, QKV_BIAS
from mcore_bridge.models.blocks_conv import CONV, CONV_MLP, CONV_NORM, CONV_NORMS, NORMS_BEHIND
from mcore_bridge.rules.mapping import respelled, under

GATE = respelled(HEAD_GATE, (("self_attn.g_proj.", "self_attn.gate_proj."),))
LAYER = (CONV_NORMS, NORMS_BEHIND, CONV, GQA, QKV_BIAS, O_BIAS, QK_NORM, GATE, CONV_MLP)
ARCHITECTURE = Architecture(
    model_type="lfm3",
    fields=but(DENSE, *CONVOLUTIONS_AND_WINDOWS, LAYER_ROPES_PROPORTIONAL),
    rules=lambda hf: (*EMBEDDING, *under("decoder.layers.*", "model.layers.*", *LAYER), *CONV_NORM),
    renamed_in_memory=((".self_attn.gate_proj", ".self_attn.g_proj"),),
)
