"""OLMo 2: norms only after attention and MLP, and norms over all heads of queries and of keys."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.tables import BIAS_ATTENTION, DENSE, NORM_POST, QK_NORMED_TOGETHER, WINDOW_NONE
from mcore_bridge.models.blocks import GQA, NORMS_POST, O_BIAS, QK_NORM, QKV_BIAS, SWIGLU, decoder

ARCHITECTURE = Architecture(
    model_type="olmo2",
    fields=(*DENSE, *BIAS_ATTENTION, *WINDOW_NONE, *QK_NORMED_TOGETHER, *NORM_POST),
    rules=lambda hf: decoder(NORMS_POST, GQA, QKV_BIAS, O_BIAS, QK_NORM, SWIGLU),
)
