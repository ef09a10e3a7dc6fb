"""GLM-4.5V and 4.6V, the text model: a glm4_moe without norms of queries and keys."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Require
from mcore_bridge.config.rope_spelling import MULTIMODAL
from mcore_bridge.config.tables import DECODER, QK_PLAIN, WINDOW_NONE, but
from mcore_bridge.config.tables.derived import biases
from mcore_bridge.config.tables.derived_rope import rope
from mcore_bridge.config.tables.moe import DENSE_FIRST, GROUPS, MTP_NEVER, ROUTED, SCALED, SIGMOID, shared_experts
from mcore_bridge.models.blocks import GQA, MOE_BIASED, NORMS, QKV_BIAS, SWIGLU, decoder

ROPE = rope(own=("partial_rotary_factor", *MULTIMODAL))
NO_NORMS = "transformers never has such norms"
OWN = (Require("use_qk_norm", (False, None), NO_NORMS), Require("qk_layernorm", (False, None), NO_NORMS), MTP_NEVER)
ARCHITECTURE = Architecture(
    model_type="glm4v_moe_text",
    aliases=("Glm4vMoe_text",),  # transformers 4.57 writes this name, and reads only the other one
    reads_as="glm4v_moe_text",
    fields=(
        *(*but(DECODER, ROPE), biases("attention_bias", None, None), *WINDOW_NONE, *QK_PLAIN, *ROUTED, *SIGMOID),
        *(SCALED, DENSE_FIRST, GROUPS, shared_experts("n_shared_experts"), *OWN),
    ),
    rules=lambda hf: decoder(NORMS, GQA, QKV_BIAS, MOE_BIASED, SWIGLU),
)
