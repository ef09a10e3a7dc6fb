"""GLM-4 (0414): norms before and after attention and MLP, half of each head rotated by neighbours, gate_up_proj."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.tables import DENSE, INTERLEAVED, NORM_SANDWICH, QK_PLAIN, WINDOW_NONE, but
from mcore_bridge.config.tables.derived import biases
from mcore_bridge.config.tables.derived_rope import rope
from mcore_bridge.models.blocks import FUSED_GLU, GQA, NORMS, QKV_BIAS, decoder, norms_behind

ROPE = rope(own=("partial_rotary_factor",))
BIASES = biases("attention_bias", None, None)
ARCHITECTURE = Architecture(
    model_type="glm4",
    fields=(*but(DENSE, *INTERLEAVED, ROPE), BIASES, *WINDOW_NONE, *QK_PLAIN, *NORM_SANDWICH),
    rules=lambda hf: decoder(NORMS, norms_behind("post_self_attn", "post_mlp"), GQA, QKV_BIAS, FUSED_GLU),
)
