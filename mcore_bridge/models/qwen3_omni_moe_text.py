"""Qwen3-Omni, the text model of its thinker: a qwen3_moe without windows."""

from dataclasses import replace

from mcore_bridge.config.tables import WINDOW_NONE, but
from mcore_bridge.config.tables.derived_rope import MULTIMODAL_ROPE
from mcore_bridge.models import qwen3_moe

ARCHITECTURE = replace(
    qwen3_moe.ARCHITECTURE,
    model_type="qwen3_omni_moe_text",
    fields=but(qwen3_moe.ARCHITECTURE.fields, MULTIMODAL_ROPE, *WINDOW_NONE),
)
