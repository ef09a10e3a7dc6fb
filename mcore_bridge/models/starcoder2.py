"""StarCoder2: a LayerNorm, no gate, biases everywhere or nowhere, a window, and other fields for dropout."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.tables import DENSE, PLAIN_MLP, QK_PLAIN, WINDOW_ALL, but, dropout, layer_norm, unread
from mcore_bridge.config.tables.derived import biases
from mcore_bridge.models.blocks import FINAL_BIAS, GQA, NORM_BIAS, NORMS, O_BIAS, QKV_BIAS, decoder, mlp

DROPOUT = dropout("residual_dropout", "embedding_dropout")
BIASES = biases("use_bias", "use_bias", "use_bias")
UNREAD = unread(
    *("activation_function", "layer_norm_epsilon", "mlp_type", "norm_type", "scale_attn_weights"),
    *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"),
)
ARCHITECTURE = Architecture(
    model_type="starcoder2",
    fields=(*but(DENSE, *layer_norm("norm_epsilon"), *PLAIN_MLP, *DROPOUT), BIASES, *WINDOW_ALL, *QK_PLAIN, UNREAD),
    rules=lambda hf: (*decoder(NORMS, NORM_BIAS, GQA, QKV_BIAS, O_BIAS, mlp("c_fc", "c_proj")), *FINAL_BIAS),
)
