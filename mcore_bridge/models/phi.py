"""Phi-1, 1.5 and 2: attention and MLP side by side after one norm, and biases everywhere, also in the head."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Const, Map
from mcore_bridge.config.tables import (
    BIAS_EVERYWHERE,
    DENSE,
    ONE_NORM,
    OWN_HEAD,
    PLAIN_MLP,
    WINDOW_NONE,
    but,
    dropout,
    layer_norm,
    unread,
)
from mcore_bridge.config.tables.derived_rope import rope
from mcore_bridge.models.blocks import EMBEDDING, QKV_BIAS, mlp
from mcore_bridge.models.blocks import ONE_NORM as NORM
from mcore_bridge.rules.layout import QKV, REPLICATED, ROW, VOCAB
from mcore_bridge.rules.mapping import table, under

ROPE, DROPOUT = rope(own=("partial_rotary_factor",)), dropout("resid_pdrop", "embd_pdrop")
# fmt: off
LAYER  = table(("input_layernorm.bias",              "input_layernorm.bias",           REPLICATED),
               ("self_attention.linear_qkv.weight",  "self_attn.{q,k,v}_proj.weight",  QKV),
               ("self_attention.linear_proj.weight", "self_attn.dense.weight",         ROW),
               ("self_attention.linear_proj.bias",   "self_attn.dense.bias",           REPLICATED),
               ("self_attention.q_layernorm.weight", "self_attn.q_layernorm.weight",   REPLICATED),
               ("self_attention.q_layernorm.bias",   "self_attn.q_layernorm.bias",     REPLICATED),
               ("self_attention.k_layernorm.weight", "self_attn.k_layernorm.weight",   REPLICATED),
               ("self_attention.k_layernorm.bias",   "self_attn.k_layernorm.bias",     REPLICATED))
BEHIND = table(("decoder.final_layernorm.weight",    "model.final_layernorm.weight",   REPLICATED),
               ("decoder.final_layernorm.bias",      "model.final_layernorm.bias",     REPLICATED),
               ("output_layer.weight",               "lm_head.weight",                 VOCAB),
               ("output_layer.bias",                 "lm_head.bias",                   VOCAB))
# fmt: on
ARCHITECTURE = Architecture(
    model_type="phi",
    fields=(
        *but(DENSE, *layer_norm("layer_norm_eps"), *PLAIN_MLP, *OWN_HEAD, *DROPOUT, ROPE),
        *(*BIAS_EVERYWHERE, *ONE_NORM, *WINDOW_NONE, Map("qk_layernorm", "qk_layernorm")),
        *(Const("output_layer_bias", True), unread("attention_bias")),
    ),
    rules=lambda hf: (
        *(*EMBEDDING, *BEHIND),
        *under("decoder.layers.*", "model.layers.*", NORM, LAYER, QKV_BIAS, mlp("fc1", "fc2")),
    ),
)
