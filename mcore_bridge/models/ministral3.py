"""Ministral 3 and Devstral 2: a mistral with yarn, and a temperature of queries that grows with their position."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.tables import BIAS_NONE, DENSE, QK_PLAIN, WINDOW_ALL, but
from mcore_bridge.config.tables.derived_rope import rope
from mcore_bridge.models.blocks import GQA, NORMS, SWIGLU, decoder

ROPE = rope(types=("yarn",), own=("llama_4_scaling_beta", "max_position_embeddings"))
ARCHITECTURE = Architecture(
    model_type="ministral3",
    fields=(*but(DENSE, ROPE), *BIAS_NONE, *WINDOW_ALL, *QK_PLAIN),
    rules=lambda hf: decoder(NORMS, GQA, SWIGLU),
)
