"""GPT-NeoX and Pythia: attention and MLP side by side, each after a norm; other tensor names than llama."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Ignore, Map, Require
from mcore_bridge.config.tables import (
    BIAS_EVERYWHERE,
    DENSE,
    OWN_HEAD,
    PLAIN_MLP,
    QK_PLAIN,
    WINDOW_NONE,
    but,
    layer_norm,
)
from mcore_bridge.config.tables.derived import DIVIDED_HEADS, PARALLEL_OR_NOT
from mcore_bridge.config.tables.derived_rope import ROTARY_ROPE
from mcore_bridge.models.blocks import NORM_BIAS, NORMS, mlp
from mcore_bridge.rules.layout import COLUMN, REPLICATED, ROW, VOCAB
from mcore_bridge.rules.mapping import table, under

OWN = (
    *(ROTARY_ROPE, DIVIDED_HEADS),
    Map("hidden_dropout", "hidden_dropout"),  # of the embedding too, as in megatron-core
    Require("attention_bias", (True, None), "megatron-core's add_bias_linear gives a bias to all linear layers"),
    Ignore("it belongs to a classification head", ("classifier_dropout",)),
)
# fmt: off
AROUND    = table(("embedding.word_embeddings.weight", "gpt_neox.embed_in.weight",         VOCAB),
                  ("decoder.final_layernorm.weight",   "gpt_neox.final_layer_norm.weight", REPLICATED),
                  ("decoder.final_layernorm.bias",     "gpt_neox.final_layer_norm.bias",   REPLICATED),
                  ("output_layer.weight",              "embed_out.weight",                 VOCAB))
ATTENTION = under("self_attention", "attention", table(
                  ("linear_qkv.weight",                "query_key_value.weight",           COLUMN),  # head by head
                  ("linear_qkv.bias",                  "query_key_value.bias",             COLUMN),
                  ("linear_proj.weight",               "dense.weight",                     ROW),
                  ("linear_proj.bias",                 "dense.bias",                       REPLICATED)))
# fmt: on
LAYER = (NORMS, NORM_BIAS, ATTENTION, mlp("dense_h_to_4h", "dense_4h_to_h"))
ARCHITECTURE = Architecture(
    model_type="gpt_neox",
    fields=(
        *but(DENSE, *layer_norm("layer_norm_eps"), *PLAIN_MLP, *OWN_HEAD, *OWN),
        *(*BIAS_EVERYWHERE, *WINDOW_NONE, *QK_PLAIN, PARALLEL_OR_NOT),
    ),
    rules=lambda hf: (*AROUND, *under("decoder.layers.*", "gpt_neox.layers.*", *LAYER)),
    # Masks in old files. GPTNeoXPreTrainedModel of transformers ignores them, and makes its own masks.
    ignored=("*.rotary_emb.inv_freq", "*.attention.bias", "*.attention.masked_bias"),
)
