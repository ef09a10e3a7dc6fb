"""Inkling, the text: scores by distance, short convolutions beside residuals, and shared experts that a router weighs.

transformers alone has text models of their own, whose files have these names.
"""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Const, Ignore, Map, Require
from mcore_bridge.config.tables import BIAS_NONE, DECODER, QK_NORMED, but, moe, unread
from mcore_bridge.config.tables.derived_rope import UNROTATED
from mcore_bridge.config.tables.inkling import ATTENTION, VOCAB
from mcore_bridge.models.blocks import EXPERTS, GQA, NORMS, QK_NORM, ROUTER, ROUTER_BIAS, SWIGLU, decoder
from mcore_bridge.rules.layout import COLUMN, REPLICATED, Rearrange
from mcore_bridge.rules.mapping import table, under

_ROWS = Rearrange("shared (tp n) m", "tp shared n m")
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
                     ("gate",                                "gate_proj",                            _ROWS),
                     ("up",                                  "up_proj",                              _ROWS),
                     ("down",                                "down_proj",                            _COLUMNS)))
# fmt: on

TIED = "tie_word_embeddings"
OWN = (
    *(ATTENTION, VOCAB, *UNROTATED, Map("conv_kernel_size", "short_conv_kernel")),
    *(Map("logits_mup_width_multiplier", "logit_divisor"), Map("route_scale", "moe_router_topk_scaling_factor")),
    *(Const("embedding_norm", "weighted"), Const("residual_convolutions", True), Const("shared_experts_scored", True)),
    *(Require(TIED, (False, None), "transformers never ties"), Const("share_embeddings_and_output_weights", False)),
    Require("shared_expert_sink", (True,), "transformers scores shared experts in any case"),
    Ignore("transformers has made layer_types of it", ("local_layer_ids",)),
    unread("rms_norm_eps_moe_gate", "number_of_conv_states"),
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
