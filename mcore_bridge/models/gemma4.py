"""Gemma 4, the text: larger heads in full layers, whose values are their keys, experts beside an MLP, scaled layers.

E2B and E4B have an input of each layer from a second embedding, and last layers with keys of earlier ones."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Const, Ignore, Require
from mcore_bridge.config.tables import GEMMA, NORM_SANDWICH, QK_NORMED, WINDOW_PATTERN, but, unread, without
from mcore_bridge.config.tables.by_layer import HEADS_AND_SHARED_KEYS, HEADS_OF_FULL, LAYER_INPUTS
from mcore_bridge.config.tables.derived import activation
from mcore_bridge.config.tables.derived_rope import LAYER_ROPES_PROPORTIONAL
from mcore_bridge.config.tables.moe import BESIDE_MLP
from mcore_bridge.config.tables.scales import LOGIT_SOFTCAP
from mcore_bridge.models.blocks_gemma import gemma4_decoder, unread_keys

CAUSAL = Require("use_bidirectional_attention", (None, "vision"), "megatron-core's GPTModel is causal")
DENSE = (
    *but(
        *(GEMMA, activation("hidden_activation", "hidden_act"), HEADS_OF_FULL, LAYER_ROPES_PROPORTIONAL, CAUSAL),
        Const("layernorm_zero_centered_gamma", False),
    ),
    *(*WINDOW_PATTERN, *NORM_SANDWICH, *QK_NORMED, LOGIT_SOFTCAP),
    *(Const("softmax_scale", 1.0), Const("layer_scalar", True)),
    Require("num_kv_shared_layers", (0,), "transformers fails without inputs of layers, as E2B and E4B have"),
    Ignore("only layers with keys and values of an earlier layer have wider MLPs", ("use_double_wide_mlp",)),
)
ARCHITECTURE = Architecture(
    model_type="gemma4_text",
    fields=(
        *but(without(DENSE, "num_moe_experts", "ffn_hidden_size"), HEADS_AND_SHARED_KEYS),
        *(*BESIDE_MLP, LAYER_INPUTS, unread("expert_intermediate_size")),
    ),
    rules=gemma4_decoder,
    mtp=unread_keys,
    expert_format="fused",
)
