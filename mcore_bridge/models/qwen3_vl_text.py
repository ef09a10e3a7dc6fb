"""Qwen3-VL, the text model: a qwen3 without windows."""

from dataclasses import replace

from mcore_bridge.config.tables import BIAS_ATTENTION, DENSE, QK_NORMED, WINDOW_NONE, but
from mcore_bridge.config.tables.derived_rope import MULTIMODAL_ROPE
from mcore_bridge.models import qwen3

ARCHITECTURE = replace(
    qwen3.ARCHITECTURE,
    model_type="qwen3_vl_text",
    fields=(*but(DENSE, MULTIMODAL_ROPE), *BIAS_ATTENTION, *WINDOW_NONE, *QK_NORMED),
)
