"""Helium: a llama that rotates neighbouring dims."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.tables import DENSE, INTERLEAVED, QK_PLAIN, WINDOW_NONE, but
from mcore_bridge.config.tables.derived import biases
from mcore_bridge.models.blocks import GQA, NORMS, QKV_BIAS, SWIGLU, decoder

BIASES = biases("attention_bias", None, "mlp_bias")
ARCHITECTURE = Architecture(
    model_type="helium",
    fields=(*but(DENSE, *INTERLEAVED), BIASES, *WINDOW_NONE, *QK_PLAIN),
    rules=lambda hf: decoder(NORMS, GQA, QKV_BIAS, SWIGLU),
)
