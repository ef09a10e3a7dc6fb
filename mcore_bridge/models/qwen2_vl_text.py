"""Qwen2-VL, the text model: a qwen2."""

from dataclasses import replace

from mcore_bridge.config.tables import but
from mcore_bridge.config.tables.derived import DIVIDED_HEADS
from mcore_bridge.config.tables.derived_rope import MULTIMODAL_ROPE
from mcore_bridge.models import qwen2

ARCHITECTURE = replace(
    qwen2.ARCHITECTURE,
    model_type="qwen2_vl_text",
    fields=but(qwen2.ARCHITECTURE.fields, MULTIMODAL_ROPE, DIVIDED_HEADS),
)
