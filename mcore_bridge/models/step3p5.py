"""Step 3.5 and 3.7, the text: heads and rope by layer, a gate for each head, routed experts, limits behind SiLU."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Const, Ignore, Map, Require
from mcore_bridge.config.tables import BIAS_ATTENTION, DECODER, QK_NORMED, but, derived, scales
from mcore_bridge.config.tables.by_layer import HEAD_GATES, HEADS_AND_LIMITS, SILU
from mcore_bridge.config.tables.derived_rope import LAYER_ROPES_PARTIAL
from mcore_bridge.config.tables.moe import EXPERT_SIZE, MLP_TYPES, MTP_NEVER, ROUTED, SIGMOID
from mcore_bridge.models.blocks import GQA, HEAD_GATE, NORMS, O_BIAS, QK_NORM, QKV_BIAS, STEP_MOE, SWIGLU, decoder

OWN = (
    *(Map("moe_router_scaling_factor", "moe_router_topk_scaling_factor"), scales.QUERY, derived.WINDOWS),
    *(Map("share_expert_dim", "moe_shared_expert_intermediate_size"), Const("layernorm_zero_centered_gamma", True)),
    Require("mlp_bias", (False,), "megatron-core would give experts and routers a bias too"),
    Require("gating", (True, "per-head"), "transformers has a gate for each head alone"),
    Require("yarn_only_types", (["full_attention"],), "transformers scales the rope of full layers alone"),
    Require("use_bidirectional_attention", (False,), "megatron-core's GPTModel is causal"),
    *(MTP_NEVER, Ignore("MTP layers are not built", ("mtp_layer_types", "mtp_mlp_layer_types"))),
)
DENSE = but(DECODER, *SILU, HEADS_AND_LIMITS, LAYER_ROPES_PARTIAL, *OWN)
ARCHITECTURE = Architecture(
    model_type="step3p5",
    fields=(*DENSE, *BIAS_ATTENTION, *QK_NORMED, *HEAD_GATES, *ROUTED, *SIGMOID, EXPERT_SIZE, MLP_TYPES),
    rules=lambda hf: decoder(NORMS, GQA, QKV_BIAS, O_BIAS, QK_NORM, HEAD_GATE, SWIGLU, STEP_MOE),
    # Their heads are those of layers with a window, and each has an output layer of its own; transformers skips them.
    mtp=lambda hf: tuple(f"model.layers.{hf.num_hidden_layers + i}.*" for i in range(hf.num_nextn_predict_layers)),
    classes=("Step3p5ForCausalLM",),
    renamed_in_memory=((".share_expert.", ".mlp.shared_experts."), (".moe.", ".mlp.experts.")),
)
