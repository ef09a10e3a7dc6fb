"""The tables of Ling and Ring, which have one tensor for queries, keys and values, and other names."""

from mcore_bridge.models.blocks import MOE, NORMS, SHARED, SWIGLU
from mcore_bridge.rules.layout import FUSED_QKV, REPLICATED, ROW, VOCAB
from mcore_bridge.rules.mapping import table, under

# fmt: off
EMBEDDING   = table(("embedding.word_embeddings.weight", "model.word_embeddings.weight", VOCAB))
ATTENTION   = under("self_attention", "attention", table(
                    ("linear_qkv.weight",                "query_key_value.weight",       FUSED_QKV),
                    ("linear_qkv.bias",                  "query_key_value.bias",         FUSED_QKV),
                    ("linear_proj.weight",               "dense.weight",                 ROW),
                    ("q_layernorm.weight",               "query_layernorm.weight",       REPLICATED),
                    ("k_layernorm.weight",               "key_layernorm.weight",         REPLICATED)))
ROUTER_BIAS = table(("mlp.router.expert_bias",           "mlp.gate.expert_bias",         REPLICATED))
LAYER       = (*NORMS, *ATTENTION, *SWIGLU, *MOE, *ROUTER_BIAS, *SHARED)
# fmt: on
