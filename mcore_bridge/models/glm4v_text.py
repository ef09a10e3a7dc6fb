"""GLM-4.1V and 4.6V-Flash, the text model: a glm4 that always has biases of q, k and v."""

from dataclasses import replace

from mcore_bridge.config.fields import Require
from mcore_bridge.config.rope_spelling import MULTIMODAL
from mcore_bridge.config.tables import BIAS_QKV, DENSE, INTERLEAVED, NORM_SANDWICH, QK_PLAIN, WINDOW_NONE, but
from mcore_bridge.config.tables.derived import DIVIDED_HEADS
from mcore_bridge.config.tables.derived_rope import rope
from mcore_bridge.models import glm4

ROPE = rope(own=("partial_rotary_factor", *MULTIMODAL))
BIASES = Require("attention_bias", (True, None), "transformers always has these biases")
ARCHITECTURE = replace(
    glm4.ARCHITECTURE,
    model_type="glm4v_text",
    fields=(*but(DENSE, *INTERLEAVED, ROPE, DIVIDED_HEADS), *BIAS_QKV, *WINDOW_NONE, *QK_PLAIN, *NORM_SANDWICH, BIASES),
)
