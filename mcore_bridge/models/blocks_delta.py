"""Shared tables of linear attention (delta rules by head and by channel), and of full attention with an output gate."""

from mcore_bridge.models.blocks import NORMS, O_BIAS, QK_NORM
from mcore_bridge.rules.layout import COLUMN, REPLICATED, ROW
from mcore_bridge.rules.mapping import table, under
from mcore_bridge.rules.mixer_layouts import (
    CONV_APART,
    DELTA,
    DELTA_CONV,
    DELTA_HEAD,
    GATED_QKV,
    IN_APART,
    KDA_CONV,
    KDA_DECAY,
    KDA_FULL_IN,
    KDA_IN,
)

# fmt: off
GATED_GQA     = table(("self_attention.linear_qkv.weight",    "self_attn.{q,k,v}_proj.weight",   GATED_QKV),
                      ("self_attention.linear_qkv.bias",      "self_attn.{q,k,v}_proj.bias",     GATED_QKV),
                      ("self_attention.linear_proj.weight",   "self_attn.o_proj.weight",         ROW))
DELTA_NET     = under("self_attention", "linear_attn", table(
                      ("conv1d.weight",                       "conv1d.weight",                   DELTA_CONV),
                      ("A_log",                               "A_log",                           COLUMN),
                      ("dt_bias",                             "dt_bias",                         COLUMN),
                      ("out_norm.weight",                     "norm.weight",                     REPLICATED),
                      ("out_proj.weight",                     "out_proj.weight",                 ROW)))
DELTA_IN      = under("self_attention", "linear_attn", table(
                      ("in_proj.weight",                      "in_proj_{qkv,z,b,a}.weight",      DELTA)))
DELTA_IN_HEAD = under("self_attention", "linear_attn", table(
                      ("in_proj.weight",                      "in_proj_{qkvz,ba}.weight",        DELTA_HEAD)))
DELTA_APART   = under("self_attention", "linear_attn", table(
                      ("in_proj.weight",                      "{q,k,v,g,b,a}_proj.weight",       IN_APART),
                      ("conv1d.weight",                       "{q,k,v}_conv1d.weight",           CONV_APART),
                      ("A_log",                               "A_log",                           COLUMN),
                      ("dt_bias",                             "dt_bias",                         COLUMN),
                      ("out_norm.weight",                     "o_norm.weight",                   REPLICATED),
                      ("out_proj.weight",                     "o_proj.weight",                   ROW)))
KDA_PARTS     = table(("conv1d.weight",                       "{q,k,v}_conv1d.weight",           KDA_CONV),
                      ("dt_bias",                             "dt_bias",                         COLUMN),
                      ("out_norm.weight",                     "o_norm.weight",                   REPLICATED),
                      ("out_proj.weight",                     "o_proj.weight",                   ROW))
KDA_RATES     = under("self_attention", "self_attn", table(
                      ("A_log",                               "A_log",                           COLUMN)))
KDA_NARROW    = under("self_attention", "self_attn", KDA_PARTS, table(
                      ("in_proj.weight",                      "{q,k,v,b,f_a,g_a}_proj.weight",   KDA_IN),
                      ("decay_up.weight",                     "f_b_proj.weight",                 COLUMN),
                      ("gate_up.weight",                      "g_b_proj.weight",                 COLUMN)))
KDA           = (*KDA_NARROW, *under("self_attention", "self_attn", table(
                      ("A_log",                               "A_log",                           KDA_DECAY))))
KDA_FULL      = (*KDA_RATES, *under("self_attention", "self_attn", KDA_PARTS, table(
                      ("in_proj.weight",                      "{q,k,v,b,f,g}_proj.weight",       KDA_FULL_IN))))
DELTA_LAYER   = (*NORMS, *GATED_GQA, *O_BIAS, *QK_NORM, *DELTA_NET)
# fmt: on
"""``DELTA_LAYER`` is a layer without its MLP, and without the input projection of linear attention.

``KDA_FULL`` is Kimi delta attention whose decay and gate have one projection each. ``KDA`` and ``KDA_NARROW`` have
narrow inputs for them, and ``KDA_NARROW`` is without ``KDA_RATES``.
"""
