"""Hunyuan 3 (Hy3): norms of queries and keys, sigmoid-routed experts and a shared one, with other names."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Ignore, Map, Require
from mcore_bridge.config.tables import BIAS_ATTENTION, DECODER, QK_NORMED, WINDOW_NONE
from mcore_bridge.config.tables.moe import MLP_TYPES, MTP_ON_REQUEST, ROUTED, SIGMOID, shared_experts
from mcore_bridge.models.blocks import (
    EXPERTS,
    GATED_MLP,
    GQA,
    NORMS,
    O_BIAS,
    QK_NORM,
    QKV_BIAS,
    SWIGLU,
    around_mtp,
    decoder,
    mtp_numbered,
)
from mcore_bridge.rules.layout import REPLICATED
from mcore_bridge.rules.mapping import table, under

ONE_ROUNDING = Ignore("a sum of two numbers is rounded once in either case", ("enable_moe_fp32_combine",))
ROUTER = table(
    ("mlp.router.weight", "mlp.router.gate.weight", REPLICATED),
    ("mlp.router.expert_bias", "mlp.expert_bias", REPLICATED),
)
SHARED = under("mlp.shared_experts", "mlp.shared_mlp", GATED_MLP)
LAYER = (NORMS, GQA, QKV_BIAS, O_BIAS, QK_NORM, ROUTER, EXPERTS, SHARED)
AROUND = around_mtp("enorm", "hnorm", "eh_proj", "final_layernorm")
ARCHITECTURE = Architecture(
    model_type="hy_v3",
    fields=(
        *(*DECODER, *BIAS_ATTENTION, *WINDOW_NONE, *QK_NORMED, *ROUTED, *SIGMOID, MLP_TYPES, ONE_ROUNDING),
        MTP_ON_REQUEST,
        Require("mlp_bias", (False,), "megatron-core would give experts and routers a bias too"),
        *(Map("router_scaling_factor", "moe_router_topk_scaling_factor"), shared_experts("num_shared_experts")),
    ),
    rules=lambda hf: (
        *decoder(*LAYER, SWIGLU),
        *mtp_numbered(hf, "model.layers.*", AROUND, *LAYER, offset=hf.num_hidden_layers),
    ),
    # Engines take the embedding and the head of the model instead, which need not be equal to these.
    mtp=lambda hf: tuple(f"model.layers.{hf.num_hidden_layers}.{name}.*" for name in ("embed_tokens", "shared_head")),
    renamed_in_memory=((".shared_mlp.", ".shared_experts."),),
)
