"""Jais 2: a LayerNorm, a squared relu instead of a gate, and biases."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.tables import BIAS_ANY, DENSE, PLAIN_MLP, QK_PLAIN, WINDOW_NONE, but, layer_norm
from mcore_bridge.models.blocks import FINAL_BIAS, GQA, NORM_BIAS, NORMS, O_BIAS, QKV_BIAS, decoder, mlp

ARCHITECTURE = Architecture(
    model_type="jais2",
    fields=(*but(DENSE, *layer_norm("layer_norm_eps"), *PLAIN_MLP), *BIAS_ANY, *WINDOW_NONE, *QK_PLAIN),
    rules=lambda hf: (
        *decoder(NORMS, NORM_BIAS, GQA, QKV_BIAS, O_BIAS, mlp("up_proj", "down_proj")),
        *FINAL_BIAS,
    ),
)
