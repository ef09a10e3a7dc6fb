"""The shared tables: each block of a transformer once, as mcore names, HF names and the layout between them."""

from mcore_bridge.weights.layout import (
    COLUMN,
    DELTA,
    DELTA_BY_HEAD,
    DELTA_CONV,
    GATED_QKV,
    GATED_UP,
    QKV,
    REPLICATED,
    ROW,
    VOCAB,
)
from mcore_bridge.weights.mapping import Rules, table, under

# fmt: off
EMBEDDING   = table(("embedding.word_embeddings.weight",    "model.embed_tokens.weight",       VOCAB))
FINAL_NORM  = table(("decoder.final_layernorm.weight",      "model.norm.weight",               REPLICATED))
NORMS       = table(("input_layernorm.weight",              "input_layernorm.weight",          REPLICATED),
                    ("pre_mlp_layernorm.weight",            "post_attention_layernorm.weight", REPLICATED))
GQA         = table(("self_attention.linear_qkv.weight",    "self_attn.{q,k,v}_proj.weight",   QKV),
                    ("self_attention.linear_proj.weight",   "self_attn.o_proj.weight",         ROW))
QKV_BIAS    = table(("self_attention.linear_qkv.bias",      "self_attn.{q,k,v}_proj.bias",     QKV))
O_BIAS      = table(("self_attention.linear_proj.bias",     "self_attn.o_proj.bias",           REPLICATED))
QK_NORM     = table(("self_attention.q_layernorm.weight",   "self_attn.q_norm.weight",         REPLICATED),
                    ("self_attention.k_layernorm.weight",   "self_attn.k_norm.weight",         REPLICATED))
SWIGLU      = under("mlp", "mlp", table(
                    ("linear_fc1.weight",                   "{gate,up}_proj.weight",           GATED_UP),
                    ("linear_fc2.weight",                   "down_proj.weight",                ROW)))
SWIGLU_BIAS = under("mlp", "mlp", table(
                    ("linear_fc1.bias",                     "{gate,up}_proj.bias",             GATED_UP),
                    ("linear_fc2.bias",                     "down_proj.bias",                  REPLICATED)))
GATED_GQA   = table(("self_attention.linear_qkv.weight",    "self_attn.{q,k,v}_proj.weight",   GATED_QKV),
                    ("self_attention.linear_proj.weight",   "self_attn.o_proj.weight",         ROW))
GATED_BIAS  = table(("self_attention.linear_qkv.bias",      "self_attn.{q,k,v}_proj.bias",     GATED_QKV))
DELTA_NET   = under("self_attention", "linear_attn", table(
                    ("conv1d.weight",                       "conv1d.weight",                   DELTA_CONV),
                    ("A_log",                               "A_log",                           COLUMN),
                    ("dt_bias",                             "dt_bias",                         COLUMN),
                    ("out_norm.weight",                     "norm.weight",                     REPLICATED),
                    ("out_proj.weight",                     "out_proj.weight",                 ROW)))
DELTA_IN    = under("self_attention", "linear_attn", table(
                    ("in_proj.weight",                      "in_proj_{qkv,z,b,a}.weight",      DELTA)))
DELTA_IN_BY_HEAD = under("self_attention", "linear_attn", table(
                    ("in_proj.weight",                      "in_proj_{qkvz,ba}.weight",        DELTA_BY_HEAD)))
# fmt: on

__all__ = [
    *("DELTA_IN", "DELTA_IN_BY_HEAD", "DELTA_NET", "GATED_BIAS", "GATED_GQA"),
    *("GQA", "NORMS", "O_BIAS", "QKV_BIAS", "QK_NORM", "SWIGLU", "SWIGLU_BIAS", "decoder"),
]


def decoder(*layer: Rules) -> Rules:
    """A decoder-only model without its head: embedding, ``layer`` at every layer, final norm."""
    return (*EMBEDDING, *under("decoder.layers.*", "model.layers.*", *layer), *FINAL_NORM)
