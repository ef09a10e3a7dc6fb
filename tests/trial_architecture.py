"""Seed-OSS, as somebody would add it: a bias on q, k and v only, and dropout of its own."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Map, Require
from mcore_bridge.config.tables import BASE, BIAS_QKV, GEOMETRY, MATHS, QK_PLAIN, WINDOW_NONE
from mcore_bridge.models.blocks import GQA, NORMS, QKV_BIAS, SWIGLU, decoder

ARCHITECTURE = Architecture(
    model_type="seed_oss",
    fields=(
        *(*BASE, *GEOMETRY, *MATHS, *BIAS_QKV, *WINDOW_NONE, *QK_PLAIN),
        Map("residual_dropout", "hidden_dropout"),
        Require("attention_bias", (True,), "the published models have it"),
        Require("attention_out_bias", (False,), "the published models have none"),
        Require("mlp_bias", (False,), "the published models have none"),
    ),
    rules=lambda hf: decoder(NORMS, GQA, QKV_BIAS, SWIGLU),
)
