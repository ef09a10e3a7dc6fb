"""Arcee: a llama with a squared relu instead of a gate."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.tables import BIAS_ANY, DENSE, PLAIN_MLP, QK_PLAIN, WINDOW_NONE, but
from mcore_bridge.models.blocks import GQA, NORMS, O_BIAS, QKV_BIAS, decoder, mlp

ARCHITECTURE = Architecture(
    model_type="arcee",
    fields=(*but(DENSE, *PLAIN_MLP), *BIAS_ANY, *WINDOW_NONE, *QK_PLAIN),
    rules=lambda hf: decoder(NORMS, GQA, QKV_BIAS, O_BIAS, mlp("up_proj", "down_proj")),
)
