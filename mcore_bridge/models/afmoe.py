"""AFMoE (Trinity): a gate for each element of attention, no rope in layers without a window, sigmoid-routed experts."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Map
from mcore_bridge.config.tables import BIAS_ATTENTION, DECODER, NORM_SANDWICH, QK_NORMED, SLIDES_OR_NOPE
from mcore_bridge.config.tables.by_layer import ELEMENT_GATES
from mcore_bridge.config.tables.moe import DENSE_LAYERS, ROUTED, SIGMOID, shared_experts
from mcore_bridge.config.tables.scales import EMBEDDING_IF_MUP
from mcore_bridge.models.blocks import EXPERTS, GQA, O_BIAS, QK_NORM, QKV_BIAS, SHARED, SWIGLU, decoder, norms_behind
from mcore_bridge.models.hy_v3 import ROUTER
from mcore_bridge.rules.layout import COLUMN, REPLICATED
from mcore_bridge.rules.mapping import of_layers, table

NORMS = table(
    ("input_layernorm.weight", "input_layernorm.weight", REPLICATED),
    ("pre_mlp_layernorm.weight", "pre_mlp_layernorm.weight", REPLICATED),
)
GATE = table(("self_attention.linear_gate.weight", "self_attn.gate_proj.weight", COLUMN))
BEHIND_ATTENTION, BEHIND_MLP = norms_behind("post_attention", "post_mlp")
EXPERT_NORM = table(("mlp.post_layernorm.weight", "post_mlp_layernorm.weight", REPLICATED))
ATTENTION = (NORMS, (BEHIND_ATTENTION,), GQA, QKV_BIAS, O_BIAS, QK_NORM, GATE)
ARCHITECTURE = Architecture(
    model_type="afmoe",
    fields=(
        *(*DECODER, *BIAS_ATTENTION, *SLIDES_OR_NOPE, *QK_NORMED, *NORM_SANDWICH, *ELEMENT_GATES, EMBEDDING_IF_MUP),
        *(*ROUTED, *SIGMOID, DENSE_LAYERS, shared_experts("num_shared_experts")),
        Map("route_scale", "moe_router_topk_scaling_factor"),
    ),
    rules=lambda hf: decoder(
        *ATTENTION,
        of_layers((BEHIND_MLP,), range(hf.num_dense_layers or 0)),
        of_layers(EXPERT_NORM, range(hf.num_dense_layers or 0, hf.num_hidden_layers)),
        *(SWIGLU, ROUTER, EXPERTS, SHARED),
    ),
)
