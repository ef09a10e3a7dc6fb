"""Inkling: scores by distance, short convolutions beside residuals, and shared experts that a router weighs.

Published files are of the composite. Their names are those of the publisher, and rows of gates alternate with rows of
what they multiply. transformers alone has text models of their own, whose files have the other names.
"""

from mcore_bridge.architecture import Architecture
from mcore_bridge.composite import Composite
from mcore_bridge.config.fields import Const, Field, Ignore, Map, Require
from mcore_bridge.config.tables import BIAS_NONE, DECODER, QK_NORMED, but, moe, published, unread
from mcore_bridge.config.tables.derived_rope import UNROTATED
from mcore_bridge.config.tables.inkling import ATTENTION
from mcore_bridge.config.tables.inkling import VOCAB as VOCABULARY
from mcore_bridge.models.blocks import EXPERTS, GQA, NORMS, QK_NORM, ROUTER, ROUTER_BIAS, SWIGLU, decoder
from mcore_bridge.models.composites import FIELDS, parts
from mcore_bridge.rules.layout import COLUMN, GATED_UP, INTERLEAVED, QKV, REPLICATED, ROW, VOCAB, Rearrange
from mcore_bridge.rules.mapping import experts, table, under

_ROWS_FIRST = Rearrange("shared n m", "n shared m")
_GATED, _ALTERNATE = _ROWS_FIRST >> GATED_UP, _ROWS_FIRST >> INTERLEAVED
_COLUMNS = Rearrange("shared n (tp m)", "tp shared n m")

# fmt: off
EMBEDDING_NORM = table(("embedding.layernorm.weight",        "model.embed_tokens.embed_norm.weight", REPLICATED))
RELATIVE     = table(("self_attention.linear_relative.weight",  "self_attn.r_proj.weight",           COLUMN),
                     ("self_attention.core_attention.profiles", "self_attn.rel_logits_proj.proj",    REPLICATED))
CONVOLUTIONS = table(("self_attention.k_conv.weight",        "self_attn.k_sconv.conv1d.weight",      REPLICATED),
                     ("self_attention.v_conv.weight",        "self_attn.v_sconv.conv1d.weight",      REPLICATED),
                     ("self_attn_bda.conv.weight",           "attn_sconv.conv1d.weight",             REPLICATED),
                     ("mlp_bda.conv.weight",                 "mlp_sconv.conv1d.weight",              REPLICATED))
SCALES       = table(("mlp_bda.scale",                       "mlp.global_scale",                     REPLICATED),
                     ("mlp.router.global_scale",             "mlp.gate.global_scale",                REPLICATED))
SHARED       = under("mlp.shared_experts", "mlp.shared_experts", table(
                     ("gate_up",                             "{gate,up}_proj",                       _GATED),
                     ("down",                                "down_proj",                            _COLUMNS)))

AROUND       = table(("embedding.word_embeddings.weight",    "model.embed.weight",                   VOCAB),
                     ("embedding.layernorm.weight",          "model.embed_norm.weight",              REPLICATED),
                     ("decoder.final_layernorm.weight",      "model.norm.weight",                    REPLICATED),
                     ("output_layer.weight",                 "model.unembed.weight",                 VOCAB))
PUBLISHED    = (*table(("input_layernorm.weight",            "attn_norm.weight",                     REPLICATED),
                     ("pre_mlp_layernorm.weight",            "mlp_norm.weight",                      REPLICATED),
                     ("self_attn_bda.conv.weight",           "attn_sconv.weight",                    REPLICATED),
                     ("mlp_bda.conv.weight",                 "mlp_sconv.weight",                     REPLICATED)),
                *under("self_attention", "attn", table(
                     ("linear_qkv.weight",                   "{wq_du,wk_dv,wv_dv}.weight",           QKV),
                     ("linear_proj.weight",                  "wo_ud.weight",                         ROW),
                     ("q_layernorm.weight",                  "q_norm.weight",                        REPLICATED),
                     ("k_layernorm.weight",                  "k_norm.weight",                        REPLICATED),
                     ("linear_relative.weight",              "wr_du.weight",                         COLUMN),
                     ("core_attention.profiles",             "rel_logits_proj.proj",                 REPLICATED),
                     ("k_conv.weight",                       "k_sconv.weight",                       REPLICATED),
                     ("v_conv.weight",                       "v_sconv.weight",                       REPLICATED))),
                *SCALES,
                *ROUTER,
                *table(("mlp.router.expert_bias",            "mlp.gate.bias",                        REPLICATED)),
                *under("mlp", "mlp", table(
                     ("linear_fc1.weight",                   "w13_dn.weight",                        INTERLEAVED),
                     ("linear_fc2.weight",                   "w2_md.weight",                         ROW))),
                *under("mlp.shared_experts", "mlp.shared_experts", table(
                     ("gate_up",                             "shared_w13_weight",                    _ALTERNATE),
                     ("down",                                "shared_w2_weight",                     _COLUMNS))),
                *experts("mlp.experts.*", "mlp.experts", table(
                     ("linear_fc1.weight",                   "w13_weight[*]",                        INTERLEAVED),
                     ("linear_fc2.weight",                   "w2_weight[*]",                         ROW))))
# fmt: on

TIED = "tie_word_embeddings"
OWN: tuple[Field, ...] = (
    *(ATTENTION, VOCABULARY, *UNROTATED, Map("conv_kernel_size", "short_conv_kernel")),
    *(Map("logits_mup_width_multiplier", "logit_divisor"), Map("route_scale", "moe_router_topk_scaling_factor")),
    *(Const("embedding_norm", "weighted"), Const("residual_convolutions", True), Const("shared_experts_scored", True)),
    *(Require(TIED, (False, None), "transformers never ties"), Const("share_embeddings_and_output_weights", False)),
    Require("shared_expert_sink", (True,), "transformers scores shared experts in any case"),
    Ignore("transformers has made layer_types of it", ("local_layer_ids",)),
    unread("rms_norm_eps_moe_gate", "number_of_conv_states"),
    *published(use_embed_norm=True, use_sconv=True, use_gate_bias=True, use_global_scale=True, norm_after_topk=True),
    *published(q_bias=False, o_bias=False, gate_activation="sigmoid", final_logit_softcapping=None),
    Ignore(
        "MTP layers are not built: transformers skips them",
        ("num_mtp_layers", "chain_hidden_post_norm", "mtp_hidden_states_first", "mtp_local_layer_ids"),
    ),
)
ROUTED = (*moe.ROUTED, *moe.SIGMOID[1:], moe.MLP_TYPES, moe.shared_experts("n_shared_experts"))
ARCHITECTURE = Architecture(
    model_type="inkling_text",
    fields=but((*DECODER, *BIAS_NONE, *QK_NORMED, *ROUTED, Const("moe_shared_expert_gate", False)), *OWN),
    rules=lambda hf: (
        *decoder(NORMS, GQA, QK_NORM, RELATIVE, CONVOLUTIONS, SCALES, SWIGLU, ROUTER, ROUTER_BIAS, EXPERTS, SHARED),
        *EMBEDDING_NORM,
    ),
    expert_format="fused",
    mtp=lambda hf: ("model.mtp.*",),
)
COMPOSITES = (
    Composite(
        model_type="inkling_mm_model",
        spelling=(("model.", "model.llm."),),
        fields=(*FIELDS, parts("mtp_config", "image_bos_token_id", "audio_bos_token_id")),
        rules=lambda hf: (*AROUND, *under("decoder.layers.*", "model.layers.*", PUBLISHED)),
        without_tower="nobody has tried to train its models of images and sound",
    ),
)
