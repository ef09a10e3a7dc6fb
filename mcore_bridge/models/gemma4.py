"""Gemma 4, the text: larger heads in full layers, whose values are their keys, experts beside an MLP, scaled layers."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Const, Ignore, Require
from mcore_bridge.config.tables import GEMMA, NORM_SANDWICH, QK_NORMED, WINDOW_PATTERN, but, unread, without
from mcore_bridge.config.tables.by_layer import HEADS_OF_FULL
from mcore_bridge.config.tables.derived import activation
from mcore_bridge.config.tables.derived_rope import LAYER_ROPES_PROPORTIONAL
from mcore_bridge.config.tables.moe import BESIDE_MLP
from mcore_bridge.config.tables.scales import LOGIT_SOFTCAP
from mcore_bridge.models.blocks import NORMS_FOUR, O_BIAS, QK_NORM, decoder
from mcore_bridge.models.blocks_gemma import SCALAR, feed_forward, projections

EMBEDDINGS = "nobody has written a second embedding with a part for each layer, which E2B and E4B have"
SHARED = "nobody has written layers that read keys and values of an earlier layer, as in E2B and E4B"
CAUSAL = Require("use_bidirectional_attention", (None, "vision"), "megatron-core's GPTModel is causal")
ARCHITECTURE = Architecture(
    model_type="gemma4_text",
    fields=(
        *but(
            *(without(GEMMA, "num_moe_experts", "ffn_hidden_size"), activation("hidden_activation", "hidden_act")),
            *(HEADS_OF_FULL, LAYER_ROPES_PROPORTIONAL, Const("layernorm_zero_centered_gamma", False), CAUSAL),
        ),
        *(*WINDOW_PATTERN, *NORM_SANDWICH, *QK_NORMED, *BESIDE_MLP, LOGIT_SOFTCAP, unread("expert_intermediate_size")),
        *(Const("softmax_scale", 1.0), Const("value_norm", True), Const("layer_scalar", True)),
        Require("hidden_size_per_layer_input", (0, None), EMBEDDINGS),
        Ignore("only embeddings for each layer have this size", ("vocab_size_per_layer_input",)),
        Require("num_kv_shared_layers", (0,), SHARED),
        Ignore("only layers with keys and values of an earlier layer have wider MLPs", ("use_double_wide_mlp",)),
    ),
    rules=lambda hf: decoder(NORMS_FOUR, *projections(hf), O_BIAS, QK_NORM, feed_forward(hf), SCALAR),
    expert_format="fused",
    aliases=("gemma4_unified_text",),  # which has no experts and no embeddings for each layer
)
