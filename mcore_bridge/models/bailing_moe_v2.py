"""Ling 2.0 and Ring, which transformers lacks: glm4_moe with one tensor for q, k and v, and other names."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Field, Map, Require
from mcore_bridge.config.tables import DECODER, WINDOW_NONE, but, published, unread
from mcore_bridge.config.tables.derived import biases
from mcore_bridge.config.tables.derived_rope import ROTARY_DIM, rope
from mcore_bridge.config.tables.moe import DENSE_FIRST, ROUTED, SCALED, SIGMOID, shared_experts
from mcore_bridge.config.tables.moe_counted import GIVEN_GROUPS
from mcore_bridge.models.blocks import MOE, NORMS, SHARED, SWIGLU, decoder
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
ONE_FORM: tuple[Field, ...] = (
    *published(score_function="sigmoid", moe_router_enable_expert_bias=True, router_dtype="fp32", use_rmsnorm=True),
    *published(use_bias=False, mlp_bias=False, embedding_dropout=0.0, output_dropout=0.0),
)
UNREAD = unread("max_window_layers", "moe_shared_expert_intermediate_size", "mtp_loss_scaling_factor")
OWN: tuple[Field, ...] = (
    *published(attention_bias=False, norm_head=False, norm_softmax=False, using_split_qkv_in_self_attention=False),
    Require("num_nextn_predict_layers", (0, None), "the published code counts them among num_hidden_layers"),
    *(*ONE_FORM, biases("use_qkv_bias", None, None), Map("use_qk_norm", "qk_layernorm"), UNREAD),
)
ARCHITECTURE = Architecture(
    model_type="bailing_moe_v2",
    classes=("BailingMoeV2ForCausalLM", "BailingMoeForCausalLM"),
    reads_as="llama",
    fields=(
        *(*but(DECODER, rope(own=("partial_rotary_factor",))), ROTARY_DIM, *WINDOW_NONE),
        *(*ROUTED, *SIGMOID, SCALED, DENSE_FIRST, GIVEN_GROUPS, shared_experts("num_shared_experts"), *OWN),
    ),
    rules=lambda hf: decoder(LAYER, embedding=EMBEDDING),
)
