"""Code World Model: a llama without biases, with a window in most layers."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Require
from mcore_bridge.config.tables import BIAS_NONE, DENSE, QK_PLAIN, WINDOW_PATTERN
from mcore_bridge.models.blocks import GQA, NORMS, SWIGLU, decoder

NO_BIAS = Require("mlp_bias", (False,), "megatron-core's add_bias_linear gives a bias to all of attention too")
ARCHITECTURE = Architecture(
    model_type="cwm",
    fields=(*DENSE, *BIAS_NONE, *WINDOW_PATTERN, *QK_PLAIN, NO_BIAS),
    rules=lambda hf: decoder(NORMS, GQA, SWIGLU),
)
