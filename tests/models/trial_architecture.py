"""StableLM, as a contributor would add it: a LayerNorm around a gated MLP, and a part of each head rotated."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Require
from mcore_bridge.config.tables import DENSE, QK_PLAIN, WINDOW_NONE, but, layer_norm
from mcore_bridge.config.tables.derived import biases
from mcore_bridge.config.tables.derived_rope import rope
from mcore_bridge.models.blocks import FINAL_BIAS, GQA, NORM_BIAS, NORMS, QKV_BIAS, SWIGLU, decoder

ARCHITECTURE = Architecture(
    model_type="stablelm",
    fields=(
        *but(DENSE, *layer_norm("layer_norm_eps"), rope(own=("partial_rotary_factor",))),
        *(biases("use_qkv_bias", None, None), *WINDOW_NONE, *QK_PLAIN),
        Require("qk_layernorm", (False,), "megatron-core has one norm for all heads"),
        Require("use_parallel_residual", (False,), "megatron-core adds attention before the MLP"),
        Require("hidden_dropout", (0.0,), "megatron-core would drop behind attention as well"),
    ),
    rules=lambda hf: (*decoder(NORMS, NORM_BIAS, GQA, QKV_BIAS, SWIGLU), *FINAL_BIAS),
)
