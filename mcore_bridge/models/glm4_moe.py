"""GLM-4.5 and 4.6: a part of each head rotated, norms of queries and keys or none, sigmoid-routed experts."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Map
from mcore_bridge.config.tables import DECODER, WINDOW_NONE, but
from mcore_bridge.config.tables.derived import biases
from mcore_bridge.config.tables.derived_rope import rope
from mcore_bridge.config.tables.moe import DENSE_FIRST, GROUPS, MTP_ON_REQUEST, ROUTED, SCALED, SIGMOID, shared_experts
from mcore_bridge.models.blocks import GQA, MOE_BIASED, NORMS, QK_NORM, QKV_BIAS, SWIGLU, decoder, mtp_behind

LAYER = (NORMS, GQA, QKV_BIAS, QK_NORM, MOE_BIASED)
ROPE = rope(own=("partial_rotary_factor",))
ARCHITECTURE = Architecture(
    model_type="glm4_moe",
    fields=(
        *(*but(DECODER, ROPE), biases("attention_bias", None, None), *WINDOW_NONE, *ROUTED, *SIGMOID),
        *(MTP_ON_REQUEST, SCALED, DENSE_FIRST, GROUPS, shared_experts("n_shared_experts")),
        Map("use_qk_norm", "qk_layernorm"),
    ),
    rules=lambda hf: (*decoder(*LAYER, SWIGLU), *mtp_behind(hf, *LAYER)),
)
