"""Hunyuan 3 (Hy3): norms of queries and keys, sigmoid-routed experts and a shared one, with other names."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Ignore, Map, Require
from mcore_bridge.config.tables import BIAS_ATTENTION, DECODER, QK_NORMED, WINDOW_NONE
from mcore_bridge.config.tables.moe import MLP_TYPES, ROUTED, SIGMOID, shared_experts
from mcore_bridge.models.blocks import EXPERTS, GATED_MLP, GQA, NORMS, O_BIAS, QK_NORM, QKV_BIAS, SWIGLU, decoder
from mcore_bridge.rules.layout import REPLICATED
from mcore_bridge.rules.mapping import table, under

ONE_ROUNDING = Ignore("a sum of two numbers is rounded once in either case", ("enable_moe_fp32_combine",))
ROUTER = table(
    ("mlp.router.weight", "mlp.router.gate.weight", REPLICATED),
    ("mlp.router.expert_bias", "mlp.expert_bias", REPLICATED),
)
SHARED = under("mlp.shared_experts", "mlp.shared_mlp", GATED_MLP)
ARCHITECTURE = Architecture(
    model_type="hy_v3",
    fields=(
        *(*DECODER, *BIAS_ATTENTION, *WINDOW_NONE, *QK_NORMED, *ROUTED, *SIGMOID, MLP_TYPES, ONE_ROUNDING),
        Require("mlp_bias", (False,), "megatron-core would give experts and routers a bias too"),
        *(Map("router_scaling_factor", "moe_router_topk_scaling_factor"), shared_experts("num_shared_experts")),
    ),
    rules=lambda hf: decoder(NORMS, GQA, QKV_BIAS, O_BIAS, QK_NORM, SWIGLU, ROUTER, EXPERTS, SHARED),
    # The layer after the decoder. HYV3PreTrainedModel ignores it in files, and has no such layer.
    mtp=lambda hf: (f"model.layers.{hf.num_hidden_layers}.*",),
    renamed_in_memory=((".shared_mlp.", ".shared_experts."),),
)
