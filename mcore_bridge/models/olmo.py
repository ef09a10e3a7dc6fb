"""OLMo: LayerNorms without weights, and in some models queries, keys and values within a bound."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Const
from mcore_bridge.config.tables import BIAS_ATTENTION, DENSE, NORM_UNWEIGHTED, QK_PLAIN, WINDOW_NONE, but
from mcore_bridge.config.tables.scales import softcap
from mcore_bridge.models.blocks import GQA, O_BIAS, QKV_BIAS, SWIGLU, decoder

NORM = (Const("normalization", "LayerNorm"), Const("layernorm_epsilon", 1e-5), *NORM_UNWEIGHTED)
ARCHITECTURE = Architecture(
    model_type="olmo",
    fields=(*but(DENSE, *NORM), *BIAS_ATTENTION, *WINDOW_NONE, *QK_PLAIN, softcap("clip_qkv", "qkv_clip")),
    rules=lambda hf: decoder(GQA, QKV_BIAS, O_BIAS, SWIGLU, final_norm=()),
)
