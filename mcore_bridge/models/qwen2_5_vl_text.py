"""Qwen2.5-VL, and the thinker of Qwen2.5-Omni, the text model: a qwen2_vl_text."""

from dataclasses import replace

from mcore_bridge.config.fields import Ignore
from mcore_bridge.models import qwen2_vl_text

INITIAL = Ignore("initial values follow initializer_range", ("init_std",))
ARCHITECTURE = replace(
    qwen2_vl_text.ARCHITECTURE,
    model_type="qwen2_5_vl_text",
    aliases=("qwen2_5_omni_text",),
    fields=(*qwen2_vl_text.ARCHITECTURE.fields, INITIAL),
)
