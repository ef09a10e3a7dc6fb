"""Shared tables of families with linear attention (the gated delta rule) in some layers."""

from mcore_bridge.config.fields import Const, Field, Ignore, Map, Require
from mcore_bridge.config.rope_spelling import MULTIMODAL
from mcore_bridge.config.tables import BIAS_ATTENTION, QK_NORMED, WINDOW_NEVER, derived_delta
from mcore_bridge.config.tables.derived_rope import rope
from mcore_bridge.config.tables.moe import MTP_ON_REQUEST

_SIZES = (
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    "linear_conv_kernel_dim",
)
DELTA: tuple[Field, ...] = (
    derived_delta.LINEAR_LAYERS,
    *(Map(name, name) for name in _SIZES),
    *(*BIAS_ATTENTION, *WINDOW_NEVER, *QK_NORMED),
    rope(own=("partial_rotary_factor", *MULTIMODAL)),
    Const("layernorm_zero_centered_gamma", True),  # of all norms but that of linear attention
    Const("attention_output_gate", True),
    Require("attn_output_gate", (True,), "full attention has an output gate in transformers, whatever this says"),
    Require("output_gate_type", ("swish",), "linear attention has a gate of silu (swish) in transformers"),
    Ignore("transformers has made layer_types of it", ("full_attention_interval",)),
    Ignore("it tells inference engines how to keep a state, which training always has in fp32", ("mamba_ssm_dtype",)),
    MTP_ON_REQUEST,
    Require("mtp_use_dedicated_embeddings", (False, None), "MTP layers of GPTModel share the embedding"),
)
"""Linear attention in some layers, full attention with an output gate in the others."""
NO_MIXED_MLP = Require(
    "mlp_only_layers", ([], None), "transformers gives each layer of this family the same kind of MLP"
)
