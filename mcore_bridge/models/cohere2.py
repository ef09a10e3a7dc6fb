"""Command R7B and A: attention and MLP side by side, a rope only in layers with a window, a scale of logits."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.tables import (
    BIAS_ATTENTION,
    DENSE,
    INTERLEAVED,
    NORM_UNBIASED,
    QK_PLAIN,
    SCALED_LOGITS,
    WINDOW_OR_NOPE,
    but,
)
from mcore_bridge.models.blocks import GQA, O_BIAS, ONE_NORM, QKV_BIAS, SWIGLU, decoder

ARCHITECTURE = Architecture(
    model_type="cohere2",
    fields=(*but(DENSE, *INTERLEAVED, *NORM_UNBIASED), *BIAS_ATTENTION, *WINDOW_OR_NOPE, *QK_PLAIN, *SCALED_LOGITS),
    rules=lambda hf: decoder(ONE_NORM, GQA, QKV_BIAS, O_BIAS, SWIGLU),
)
