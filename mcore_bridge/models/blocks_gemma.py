"""Tables of weight rules of Gemma 4: keys that are values, experts beside an MLP, and a scale for each layer."""

from typing import TYPE_CHECKING

from mcore_bridge.config.rope_spelling import FULL
from mcore_bridge.models.blocks import (
    GATED_MLP,
    GQA,
    NORMS_BEFORE,
    NORMS_POST,
    O_BIAS,
    QK_NORM,
    QKV_BIAS,
    SWIGLU,
    decoder,
)
from mcore_bridge.rules.layout import QK, REPLICATED
from mcore_bridge.rules.mapping import Rules, experts, of_layers, table, under

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# fmt: off
SCALAR         = table(("mlp_bda.layer_scalar",              "layer_scalar",                      REPLICATED))
KEYS_AS_VALUES = table(("self_attention.linear_qk.weight",   "self_attn.{q,k}_proj.weight",       QK),
                       ("self_attention.linear_qk.bias",     "self_attn.{q,k}_proj.bias",         QK))
BESIDE         = (*table(
                       ("mlp.router.weight",                 "router.proj.weight",                REPLICATED),
                       ("mlp.router.input_scale",            "router.scale",                      REPLICATED),
                       ("mlp.router.expert_scale",           "router.per_expert_scale",           REPLICATED),
                       ("mlp.dense_layernorm.weight",        "pre_feedforward_layernorm.weight",  REPLICATED),
                       ("mlp.shared_experts.linear_fc2.post_layernorm.weight",
                                                             "post_feedforward_layernorm_1.weight", REPLICATED),
                       ("mlp.routed_layernorm.weight",       "pre_feedforward_layernorm_2.weight", REPLICATED),
                       ("mlp.routed_post_layernorm.weight",  "post_feedforward_layernorm_2.weight", REPLICATED),
                       ("mlp.post_layernorm.weight",         "post_feedforward_layernorm.weight", REPLICATED)),
                  *under("mlp.shared_experts",               "mlp",                               GATED_MLP),
                  *experts("mlp.experts.*",                  "experts.*",                         GATED_MLP))
# fmt: on


def gemma4_decoder(hf: "PretrainedConfig") -> Rules:
    """A decoder in which full layers may have keys as values, and all layers may have experts beside their MLP."""
    (before, before_mlp), (behind, behind_mlp) = NORMS_BEFORE, NORMS_POST
    mlp = BESIDE if getattr(hf, "enable_moe_block", False) else (before_mlp, *SWIGLU, behind_mlp)
    return decoder((before, behind), *_projections(hf), O_BIAS, QK_NORM, mlp, SCALAR)


def _projections(hf: "PretrainedConfig") -> tuple[Rules, ...]:
    """The projections of attention, of layers with values of their own, and of layers whose keys are their values."""
    shares = [bool(hf.attention_k_eq_v) and kind == FULL for kind in hf.layer_types]
    qkv, output = GQA
    own = of_layers((qkv, *QKV_BIAS), (layer for layer, is_shared in enumerate(shares) if not is_shared))
    return own, of_layers(KEYS_AS_VALUES, (layer for layer, is_shared in enumerate(shares) if is_shared)), (output,)
