"""StableLM: a LayerNorm around a gated MLP, and a part of each head is rotated."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Require
from mcore_bridge.config.tables import DENSE, QK_PLAIN, WINDOW_NONE, but, layer_norm
from mcore_bridge.config.tables.derived import DIVIDED_HEADS, biases
from mcore_bridge.config.tables.derived_rope import rope
from mcore_bridge.models.blocks import FINAL_BIAS, GQA, NORM_BIAS, NORMS, QKV_BIAS, SWIGLU, decoder

ARCHITECTURE = Architecture(
    model_type="stablelm",
    fields=(
        *but(DENSE, *layer_norm("layer_norm_eps"), rope(own=("partial_rotary_factor",)), DIVIDED_HEADS),
        *(biases("use_qkv_bias", None, None), *WINDOW_NONE, *QK_PLAIN),
        Require("qk_layernorm", (False,), "norms have other weights in each head, and nobody has written such norms"),
        Require("use_parallel_residual", (False,), "nobody has tried attention and MLP side by side in this family"),
        Require("hidden_dropout", (0.0,), "megatron-core would drop behind attention as well"),
    ),
    rules=lambda hf: (*decoder(NORMS, NORM_BIAS, GQA, QKV_BIAS, SWIGLU), *FINAL_BIAS),
)
