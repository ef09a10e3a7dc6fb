"""Command R and R+: attention and MLP side by side after one LayerNorm without bias, and a scale of logits."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Const, Map
from mcore_bridge.config.tables import (
    BIAS_ATTENTION,
    DENSE,
    INTERLEAVED,
    NORM_UNBIASED,
    SCALED_LOGITS,
    WINDOW_NONE,
    but,
)
from mcore_bridge.models.blocks import GQA, O_BIAS, ONE_NORM, QK_NORM, QKV_BIAS, SWIGLU, decoder

QK_NORMS = (Map("use_qk_norm", "qk_layernorm"), Const("qk_norm_kind", "each_head"))
ARCHITECTURE = Architecture(
    model_type="cohere",
    fields=(
        *(*but(DENSE, *INTERLEAVED, *NORM_UNBIASED), *BIAS_ATTENTION, *WINDOW_NONE),
        *(*SCALED_LOGITS, *QK_NORMS),
    ),
    rules=lambda hf: decoder(ONE_NORM, GQA, QKV_BIAS, O_BIAS, QK_NORM, SWIGLU),
)
