"""ERNIE 4.5: a llama that rotates neighbouring dims, with biases everywhere or nowhere."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Const, Preset
from mcore_bridge.config.tables import DECODER, INTERLEAVED, QK_PLAIN, WINDOW_NONE, but, unread
from mcore_bridge.config.tables.derived import biases
from mcore_bridge.models.blocks import GQA, NORMS, O_BIAS, QKV_BIAS, SWIGLU, SWIGLU_BIAS, decoder

BIASES = biases("use_bias", "use_bias", "use_bias")
NO_DROPOUT = (Preset("attention_dropout", 0.0), unread("attention_dropout", "use_rmsnorm"))
ERNIE = (*but(DECODER, *INTERLEAVED, *NO_DROPOUT), *WINDOW_NONE, *QK_PLAIN)
ARCHITECTURE = Architecture(
    model_type="ernie4_5",
    fields=(*ERNIE, BIASES, Const("num_moe_experts", None)),
    rules=lambda hf: decoder(NORMS, GQA, QKV_BIAS, O_BIAS, SWIGLU, SWIGLU_BIAS),
)
