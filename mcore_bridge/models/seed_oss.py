"""Seed-OSS: biases of q, k and v by default, and dropout after attention and MLP."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.tables import DENSE, QK_PLAIN, WINDOW_NONE, but, dropout
from mcore_bridge.config.tables.derived import biases
from mcore_bridge.models.blocks import GQA, NORMS, O_BIAS, QKV_BIAS, SWIGLU, SWIGLU_BIAS, decoder

BIASES = biases("attention_bias", "attention_out_bias", "mlp_bias")
ARCHITECTURE = Architecture(
    model_type="seed_oss",
    fields=(*but(DENSE, *dropout("residual_dropout")), BIASES, *WINDOW_NONE, *QK_PLAIN),
    rules=lambda hf: decoder(NORMS, GQA, QKV_BIAS, O_BIAS, SWIGLU, SWIGLU_BIAS),
)
