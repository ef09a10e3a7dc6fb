"""OLMo 3: an OLMo 2 with a window in most layers; the rope of these layers is not scaled."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.tables import BIAS_ATTENTION, DENSE, NORM_POST, QK_NORMED_TOGETHER, WINDOW_PATTERN, but
from mcore_bridge.config.tables.derived_rope import LAYER_ROPES_ONE_BASE
from mcore_bridge.models.blocks import GQA, NORMS_POST, O_BIAS, QK_NORM, QKV_BIAS, SWIGLU, decoder

ARCHITECTURE = Architecture(
    model_type="olmo3",
    fields=(*but(DENSE, LAYER_ROPES_ONE_BASE), *BIAS_ATTENTION, *WINDOW_PATTERN, *QK_NORMED_TOGETHER, *NORM_POST),
    rules=lambda hf: decoder(NORMS_POST, GQA, QKV_BIAS, O_BIAS, QK_NORM, SWIGLU),
)
