"""Llama 2 and 3.x, and every model that is published as a llama: all ropes, biases in attention and MLP."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.tables import BIAS_ANY, DENSE, QK_PLAIN, WINDOW_NONE, unread
from mcore_bridge.models.blocks import GQA, NORMS, O_BIAS, QKV_BIAS, SWIGLU, SWIGLU_BIAS, decoder

OF_ROPE = unread("type")  # of the rope_scaling, which LLaVA-NeXT-Video-7B-hf repeats outside of it
ARCHITECTURE = Architecture(
    model_type="llama",
    fields=(*DENSE, *BIAS_ANY, *WINDOW_NONE, *QK_PLAIN, OF_ROPE),
    rules=lambda hf: decoder(NORMS, GQA, QKV_BIAS, O_BIAS, SWIGLU, SWIGLU_BIAS),
)
