"""SmolLM3: a llama in which some layers have no rope, and some may have a window."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Ignore
from mcore_bridge.config.tables import BIAS_ANY, DENSE, QK_PLAIN, WINDOW_SWITCHED
from mcore_bridge.config.tables.derived_rope import NO_ROPE
from mcore_bridge.models.blocks import GQA, NORMS, O_BIAS, QKV_BIAS, SWIGLU, SWIGLU_BIAS, decoder

INTERVAL = Ignore("transformers has made no_rope_layers of it", ("no_rope_layer_interval",))
ARCHITECTURE = Architecture(
    model_type="smollm3",
    fields=(*DENSE, *BIAS_ANY, *WINDOW_SWITCHED, *QK_PLAIN, NO_ROPE, INTERVAL),
    rules=lambda hf: decoder(NORMS, GQA, QKV_BIAS, O_BIAS, SWIGLU, SWIGLU_BIAS),
)
