"""Gemma 4, the dense text: larger heads in full layers, whose values are their keys, and a number for each layer."""

from typing import TYPE_CHECKING

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Const, Ignore, Require
from mcore_bridge.config.rope_spelling import FULL
from mcore_bridge.config.tables import GEMMA, NORM_SANDWICH, QK_NORMED, WINDOW_PATTERN, but, without
from mcore_bridge.config.tables.by_layer import HEADS_OF_FULL
from mcore_bridge.config.tables.derived import activation
from mcore_bridge.config.tables.derived_rope import LAYER_ROPES_PROPORTIONAL
from mcore_bridge.config.tables.moe import BESIDE_MLP
from mcore_bridge.config.tables.scales import LOGIT_SOFTCAP
from mcore_bridge.models.blocks import GATED_MLP, GQA, NORMS_FOUR, O_BIAS, QK_NORM, QKV_BIAS, SWIGLU, decoder
from mcore_bridge.rules.layout import QK, REPLICATED
from mcore_bridge.rules.mapping import Rules, experts, of_layers, table, under

if TYPE_CHECKING:
    from transformers import PretrainedConfig

KEYS_AS_VALUES = table(
    ("self_attention.linear_qk.weight", "self_attn.{q,k}_proj.weight", QK),
    ("self_attention.linear_qk.bias", "self_attn.{q,k}_proj.bias", QK),
)
SCALAR = table(("mlp_bda.layer_scalar", "layer_scalar", REPLICATED))
BESIDE = (
    *table(
        ("mlp.router.weight", "router.proj.weight", REPLICATED),
        ("mlp.router.input_scale", "router.scale", REPLICATED),
        ("mlp.router.expert_scale", "router.per_expert_scale", REPLICATED),
        ("mlp.dense_layernorm.weight", "pre_feedforward_layernorm.weight", REPLICATED),
        ("mlp.shared_experts.linear_fc2.post_layernorm.weight", "post_feedforward_layernorm_1.weight", REPLICATED),
        ("mlp.routed_layernorm.weight", "pre_feedforward_layernorm_2.weight", REPLICATED),
        ("mlp.routed_post_layernorm.weight", "post_feedforward_layernorm_2.weight", REPLICATED),
        ("mlp.post_layernorm.weight", "post_feedforward_layernorm.weight", REPLICATED),
    ),
    *under("mlp.shared_experts", "mlp", GATED_MLP),
    *experts("mlp.experts.*", "experts.*", GATED_MLP),
)
SHARED = "nobody has written layers that read keys and values of another layer, as the E2B and E4B variants have"


def _projections(hf: "PretrainedConfig") -> tuple[Rules, ...]:
    """The projections of attention, of layers with values of their own, and of layers whose keys are their values."""
    shares = [bool(hf.attention_k_eq_v) and kind == FULL for kind in hf.layer_types]
    qkv, output = GQA
    own = of_layers((qkv, *QKV_BIAS), (layer for layer, is_shared in enumerate(shares) if not is_shared))
    return own, of_layers(KEYS_AS_VALUES, (layer for layer, is_shared in enumerate(shares) if is_shared)), (output,)


def _mlp(hf: "PretrainedConfig") -> Rules:
    return BESIDE if getattr(hf, "enable_moe_block", False) else SWIGLU


ARCHITECTURE = Architecture(
    model_type="gemma4_text",
    fields=(
        *but(
            without(GEMMA, "num_moe_experts", "ffn_hidden_size"),
            *(activation("hidden_activation", "hidden_act"), HEADS_OF_FULL, LAYER_ROPES_PROPORTIONAL),
            Const("layernorm_zero_centered_gamma", False),
            Require("use_bidirectional_attention", (None, "vision"), "megatron-core's GPTModel is causal"),
        ),
        *(*WINDOW_PATTERN, *NORM_SANDWICH, *QK_NORMED, LOGIT_SOFTCAP),
        *(Const("softmax_scale", 1.0), Const("value_norm", True), Const("layer_scalar", True)),
        Require("hidden_size_per_layer_input", (0, None), "nobody has written embeddings for each layer, as in E2B"),
        Require("num_kv_shared_layers", (0,), SHARED),
        Require("use_double_wide_mlp", (False,), SHARED),
        *BESIDE_MLP,
        Require("expert_intermediate_size", (None,), "transformers does not read it"),
        Ignore("only embeddings for each layer have this size", ("vocab_size_per_layer_input",)),
    ),
    rules=lambda hf: decoder(NORMS_FOUR, *_projections(hf), O_BIAS, QK_NORM, _mlp(hf), SCALAR),
    expert_format="fused",
    aliases=("gemma4_unified_text",),  # which has no experts and no embeddings for each layer
)
