"""Command A with experts: a cohere2 with routed experts, a rope in dense layers, and RMSNorms or LayerNorms."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Const, Ignore, Require
from mcore_bridge.config.tables import BIAS_ATTENTION, DECODER, INTERLEAVED, QK_PLAIN, but, without
from mcore_bridge.config.tables.cohere_moe import COMBINED, NORM, SELECTED, SIZES, TURNED
from mcore_bridge.config.tables.moe import MLP_TYPES, ROUTED
from mcore_bridge.config.tables.parallel import ONE_NORM, SCALED_LOGITS
from mcore_bridge.models.blocks import GQA, MOE, O_BIAS, QKV_BIAS, SHARED, SWIGLU, decoder
from mcore_bridge.models.blocks import ONE_NORM as NORM_RULES

ROUTER = (Const("moe_router_enable_expert_bias", False), Const("moe_router_pre_softmax", False))
OWN = (
    Const("moe_shared_expert_gate", False),
    Require("prefix_dense_sliding_window_pattern", (1,), "dense layers would have no rope; nobody has written this"),
    Ignore("transformers has made layer_types of it", ("sliding_window_pattern",)),
)
ARCHITECTURE = Architecture(
    model_type="cohere2_moe",
    fields=(
        *(
            *but(without(DECODER, "normalization"), *INTERLEAVED, NORM, SIZES),
            *BIAS_ATTENTION,
            TURNED,
            *QK_PLAIN,
            *ONE_NORM,
            *SCALED_LOGITS,
        ),
        *(*ROUTED, *ROUTER, SELECTED, COMBINED, MLP_TYPES, *OWN),
    ),
    rules=lambda hf: decoder(NORM_RULES, GQA, QKV_BIAS, O_BIAS, SWIGLU, MOE, SHARED),
)
