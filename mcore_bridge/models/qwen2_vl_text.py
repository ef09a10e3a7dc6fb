"""Qwen2-VL, the text model: a qwen2."""

from dataclasses import replace

from mcore_bridge.config.fields import Ignore
from mcore_bridge.config.tables import but
from mcore_bridge.config.tables.derived_rope import MULTIMODAL_ROPE
from mcore_bridge.models import qwen2

OF_IMAGES = Ignore("it is a token of images, which transformers 4.57 hands to the text config", ("vision_token_id",))
ARCHITECTURE = replace(
    qwen2.ARCHITECTURE,
    model_type="qwen2_vl_text",
    fields=(*but(qwen2.ARCHITECTURE.fields, MULTIMODAL_ROPE), OF_IMAGES),
)
