"""Hunyuan-VL and HunyuanOCR, the text model: a hunyuan_v1_dense."""

from dataclasses import replace

from mcore_bridge.config.rope_spelling import MULTIMODAL
from mcore_bridge.config.tables import but
from mcore_bridge.config.tables.derived_rope import alpha_rope
from mcore_bridge.models import hunyuan_v1_dense

ARCHITECTURE = replace(
    hunyuan_v1_dense.ARCHITECTURE,
    model_type="hunyuan_vl_text",
    fields=but(hunyuan_v1_dense.ARCHITECTURE.fields, alpha_rope(MULTIMODAL)),
)
