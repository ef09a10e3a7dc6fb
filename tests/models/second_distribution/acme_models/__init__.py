"""A package of another author: an architecture with a separate layer spec and model class."""

import acme_models.transformers_side as _  # noqa: F401
from acme_models.megatron_side import AcmeGPT, layer_spec
from mcore_bridge import Architecture
from mcore_bridge.config.tables import BIAS_ANY, DENSE, QK_PLAIN, WINDOW_NONE
from mcore_bridge.models.blocks import GQA, NORMS, SWIGLU, decoder
from mcore_bridge.rules.layout import REPLICATED
from mcore_bridge.rules.mapping import table

GAIN = table(("input_layernorm.gain", "input_layernorm.gain", REPLICATED))

ARCHITECTURE = Architecture(
    model_type="acme",
    fields=(*DENSE, *BIAS_ANY, *WINDOW_NONE, *QK_PLAIN),
    rules=lambda hf: decoder(NORMS, GAIN, GQA, SWIGLU),
    layer_spec=layer_spec,
    model=AcmeGPT,
)
