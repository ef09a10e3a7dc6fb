"""StarCoder2: a LayerNorm, no gate, biases everywhere or nowhere, a window, and dropout of its own."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.derived import biases
from mcore_bridge.config.fields import Map
from mcore_bridge.config.tables import DENSE, LAYER_NORM, PLAIN_MLP, QK_PLAIN, WINDOW_ALL, but, dropout
from mcore_bridge.models.blocks import FINAL_BIAS, GQA, NORM_BIAS, NORMS, O_BIAS, QKV_BIAS, decoder, mlp

NORM = (*LAYER_NORM, Map("norm_epsilon", "layernorm_epsilon"))
DROPOUT = dropout("residual_dropout", "embedding_dropout")
BIASES = biases("use_bias", "use_bias", "use_bias")
ARCHITECTURE = Architecture(
    model_type="starcoder2",
    fields=(*but(DENSE, *NORM, *PLAIN_MLP, *DROPOUT), BIASES, *WINDOW_ALL, *QK_PLAIN),
    rules=lambda hf: (*decoder(NORMS, NORM_BIAS, GQA, QKV_BIAS, O_BIAS, mlp("c_fc", "c_proj")), *FINAL_BIAS),
    ignored=("*.rotary_emb.inv_freq",),
)
