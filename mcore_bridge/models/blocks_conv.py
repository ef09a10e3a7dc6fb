"""Shared tables of short convolutions in the place of attention, and of the attention and the MLPs beside them."""

from mcore_bridge.models.blocks import MLP_W123, norms_behind
from mcore_bridge.rules.layout import COLUMN, QKV, REPLICATED, ROW
from mcore_bridge.rules.mapping import experts, table, under
from mcore_bridge.rules.mixer_layouts import SHORT_CONV_IN

# fmt: off
CONV_MLP     = under("mlp", "feed_forward", MLP_W123)
CONV_EXPERTS = (*under("mlp", "feed_forward", table(
                     ("router.weight",            "gate.weight",          REPLICATED),
                     ("router.expert_bias",       "expert_bias",          REPLICATED))),
                *experts("mlp.experts.*",         "feed_forward.experts.*", MLP_W123))
CONV_NORMS   = table(("input_layernorm.weight",   "operator_norm.weight", REPLICATED),
                     ("pre_mlp_layernorm.weight", "ffn_norm.weight",      REPLICATED))
NORMS_BEHIND = (*norms_behind("post_operator", "post_ffn", "norm"), *table(
                     ("self_attention.out_proj.post_layernorm.weight", "post_operator_norm.weight", REPLICATED)))
CONV         = under("self_attention", "conv", table(
                     ("in_proj.weight",           "in_proj.weight",       SHORT_CONV_IN),
                     ("conv1d.weight",            "conv.weight",          COLUMN),
                     ("out_proj.weight",          "out_proj.weight",      ROW)))
CONV_LAYER   = (*CONV_NORMS, *CONV, *under("self_attention", "self_attn", table(
                     ("linear_qkv.weight",        "{q,k,v}_proj.weight",  QKV),
                     ("linear_proj.weight",       "out_proj.weight",      ROW),
                     ("q_layernorm.weight",       "q_layernorm.weight",   REPLICATED),
                     ("k_layernorm.weight",       "k_layernorm.weight",   REPLICATED))))
CONV_NORM    = table(("decoder.final_layernorm.weight", "model.embedding_norm.weight", REPLICATED))
# fmt: on
"""``CONV_LAYER`` is a layer without its MLP or experts, and ``CONV_NORM`` the final norm."""
