"""EXAONE 3 and 3.5: a llama under other names, for which transformers has a config class since 5.24."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.tables import published
from mcore_bridge.models import llama
from mcore_bridge.rules.layout import GATED_UP, QKV, REPLICATED, ROW, VOCAB
from mcore_bridge.rules.mapping import table, under

# fmt: off
AROUND = table(("embedding.word_embeddings.weight", "transformer.wte.weight",                 VOCAB),
               ("decoder.final_layernorm.weight",   "transformer.ln_f.weight",                REPLICATED))
LAYER  = table(("input_layernorm.weight",           "ln_1.weight",                            REPLICATED),
               ("pre_mlp_layernorm.weight",         "ln_2.weight",                            REPLICATED),
               ("self_attention.linear_qkv.weight", "attn.attention.{q_proj,k_proj,v_proj}.weight", QKV),
               ("self_attention.linear_proj.weight", "attn.attention.out_proj.weight",        ROW),
               ("mlp.linear_fc1.weight",            "mlp.{c_fc_0,c_fc_1}.weight",             GATED_UP),
               ("mlp.linear_fc2.weight",            "mlp.c_proj.weight",                      ROW))
# fmt: on
ARCHITECTURE = Architecture(
    model_type="exaone",
    classes=("ExaoneForCausalLM",),
    reads_as="llama",
    published_fields=(
        *(("num_hidden_layers", "num_layers"), ("rms_norm_eps", "layer_norm_epsilon")),
        ("hidden_act", "activation_function"),
    ),
    fields=(*llama.ARCHITECTURE.fields, *published(embed_dropout=0.0)),
    rules=lambda hf: (*AROUND, *under("decoder.layers.*", "transformer.h.*", LAYER)),
)
