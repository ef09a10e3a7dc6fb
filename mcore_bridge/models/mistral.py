"""Mistral: a llama without biases, with a window in all layers or in none."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Require
from mcore_bridge.config.tables import BIAS_NONE, DENSE, QK_PLAIN, WINDOW_ALL
from mcore_bridge.models.blocks import GQA, NORMS, SWIGLU, decoder

IN_ALL = Require(
    "layer_types",
    (None,),
    "every layer of this family slides. Set model_type to 'ministral' for layers that differ, or delete the field to "
    "get the model that transformers builds from this config",
)
ARCHITECTURE = Architecture(
    model_type="mistral",
    fields=(*DENSE, *BIAS_NONE, *WINDOW_ALL, IN_ALL, *QK_PLAIN),
    rules=lambda hf: decoder(NORMS, GQA, SWIGLU),
)
