"""Mistral Small 4: latent attention with a temperature that depends on the position, and softmax-routed experts."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Require
from mcore_bridge.config.tables import LATENT, but
from mcore_bridge.config.tables.derived_latent import QUERY_DIM, ROPE_OF_PART
from mcore_bridge.config.tables.moe import DENSE_FIRST, SOFTMAX_BY_CONFIG
from mcore_bridge.config.tables.moe_counted import COUNTED
from mcore_bridge.models.blocks import MLA, MOE, NORMS, SHARED, SWIGLU, decoder

ONE_GROUP = "megatron-core ranks groups by logits, and HF by a softmax of them"
ARCHITECTURE = Architecture(
    model_type="mistral4",
    fields=(
        *(*but(LATENT, ROPE_OF_PART), *COUNTED, *SOFTMAX_BY_CONFIG, DENSE_FIRST, QUERY_DIM),
        *(Require("n_group", (1, None), ONE_GROUP), Require("topk_group", (1, None), ONE_GROUP)),
    ),
    expert_format="fused",
    rules=lambda hf: decoder(NORMS, MLA, SWIGLU, MOE, SHARED),
)
