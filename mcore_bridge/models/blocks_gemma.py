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
from mcore_bridge.rules.layout import COLUMN, QK, REPLICATED, VOCAB
from mcore_bridge.rules.mapping import Rules, experts, of_layers, table, under

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# fmt: off
SCALAR         = table(("mlp_bda.layer_scalar",              "layer_scalar",                      REPLICATED))
KEYS_AS_VALUES = table(("self_attention.linear_qk.weight",   "self_attn.{q,k}_proj.weight",       QK),
                       ("self_attention.linear_qk.bias",     "self_attn.{q,k}_proj.bias",         QK))
QUERIES        = table(("self_attention.linear_q_proj.weight", "self_attn.q_proj.weight",         COLUMN),
                       ("self_attention.linear_q_proj.bias", "self_attn.q_proj.bias",             COLUMN))
INPUT          = table(("mlp_bda.gate.weight",               "per_layer_input_gate.weight",       REPLICATED),
                       ("mlp_bda.projection.weight",         "per_layer_projection.weight",       REPLICATED),
                       ("mlp_bda.layernorm.weight",          "post_per_layer_input_norm.weight",  REPLICATED))
INPUTS         = under("embedding.layer_inputs", "model", table(
                       ("word_embeddings.weight",            "embed_tokens_per_layer.weight",     VOCAB),
                       ("projection.weight",                 "per_layer_model_projection.weight", REPLICATED),
                       ("layernorm.weight",                  "per_layer_projection_norm.weight",  REPLICATED)))
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
    inputs = (INPUTS, INPUT) if getattr(hf, "hidden_size_per_layer_input", None) else ((), ())
    return (*inputs[0], *decoder((before, behind), *_projections(hf), O_BIAS, mlp, SCALAR, inputs[1]))


def unread_keys(hf: "PretrainedConfig") -> tuple[str, ...]:
    """Tensors of layers that read keys and values of earlier ones. Files have them, and transformers skips them."""
    names = ("k_proj", "v_proj", "k_norm", "v_norm")
    return tuple(f"model.layers.{layer}.self_attn.{name}.*" for layer in _readers(hf) for name in names)


def _readers(hf: "PretrainedConfig") -> range:
    """The layers that read keys and values of earlier ones."""
    return range(hf.num_hidden_layers - (hf.num_kv_shared_layers or 0), hf.num_hidden_layers)


def _projections(hf: "PretrainedConfig") -> tuple[Rules, ...]:
    """The projections of attention, of layers with values of their own, and of layers whose keys are their values."""
    shares = [bool(hf.attention_k_eq_v) and kind == FULL for kind in hf.layer_types]
    (qkv, output), (query_norm, key_norm), readers = GQA, QK_NORM, _readers(hf)
    own = [layer for layer in range(readers.start) if not shares[layer]]
    without = [layer for layer in range(readers.start) if shares[layer]]
    norms = (query_norm, *of_layers((key_norm,), range(readers.start)))
    projections = (of_layers((qkv, *QKV_BIAS), own), of_layers(KEYS_AS_VALUES, without), of_layers(QUERIES, readers))
    return (*projections, (output,), norms)
