"""EXAONE 4: norms only after attention and MLP, norms of queries and keys, no rope in layers without a window."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.tables import BIAS_NONE, DENSE, NORM_POST, QK_NORMED, WINDOW_OR_NOPE
from mcore_bridge.models.blocks import GQA, NORMS_POST, QK_NORM, SWIGLU, decoder

ARCHITECTURE = Architecture(
    model_type="exaone4",
    fields=(*DENSE, *BIAS_NONE, *WINDOW_OR_NOPE, *QK_NORMED, *NORM_POST),
    rules=lambda hf: decoder(NORMS_POST, GQA, QK_NORM, SWIGLU),
)
