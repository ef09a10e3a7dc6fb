"""Laguna: heads and rope by layer, a gate for each head or element, sigmoid-routed experts and a shared one."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Map, Require
from mcore_bridge.config.tables import BIAS_ATTENTION, DECODER, QK_NORMED, WINDOW_BY_LAYER, but
from mcore_bridge.config.tables.by_layer import GATING, QUERY_HEADS
from mcore_bridge.config.tables.derived_rope import LAYER_ROPES_PARTIAL
from mcore_bridge.config.tables.moe import EXPERT_SIZE, MLP_TYPES, ROUTED, SIGMOID
from mcore_bridge.models.blocks import GATED_MLP, GQA, HEAD_GATE, MOE, NORMS, O_BIAS, QK_NORM, QKV_BIAS, SWIGLU, decoder
from mcore_bridge.rules.layout import REPLICATED
from mcore_bridge.rules.mapping import table, under

BIAS = table(("mlp.router.expert_bias", "mlp.experts.e_score_correction_bias", REPLICATED))
SHARED = under("mlp.shared_experts", "mlp.shared_expert", GATED_MLP)
ARCHITECTURE = Architecture(
    model_type="laguna",
    fields=(
        *(*but(DECODER, QUERY_HEADS, LAYER_ROPES_PARTIAL), *BIAS_ATTENTION, *WINDOW_BY_LAYER, *QK_NORMED),
        *(*ROUTED, *SIGMOID, EXPERT_SIZE, MLP_TYPES, *GATING),
        Map("moe_routed_scaling_factor", "moe_router_topk_scaling_factor"),
        Map("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
        Require("moe_router_logit_softcapping", (0.0, 0), "megatron-core's router has no soft cap"),
        Require("moe_apply_router_weight_on_input", (False,), "transformers multiplies the outputs of experts"),
    ),
    rules=lambda hf: decoder(NORMS, GQA, QKV_BIAS, O_BIAS, QK_NORM, HEAD_GATE, SWIGLU, MOE, BIAS, SHARED),
    renamed_in_memory=((".shared_expert.", ".shared_experts."),),
)
