"""Nemotron: a zero-centred LayerNorm, a squared relu instead of a gate, and a rope in half of each head."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Const, Ignore
from mcore_bridge.config.tables import BIAS_ANY, DENSE, PLAIN_MLP, QK_PLAIN, WINDOW_NONE, but, layer_norm, unread
from mcore_bridge.config.tables.derived_rope import rope
from mcore_bridge.models.blocks import FINAL_BIAS, GQA, NORM_BIAS, NORMS, O_BIAS, QKV_BIAS, decoder, mlp

ROPE = rope(types=("default",), own=("partial_rotary_factor",))
NORM = (*layer_norm("norm_eps"), Const("layernorm_zero_centered_gamma", True))
ARCHITECTURE = Architecture(
    model_type="nemotron",
    fields=(
        *but(DENSE, *NORM, *PLAIN_MLP, ROPE),
        *(*BIAS_ANY, *WINDOW_NONE, *QK_PLAIN, unread("kv_channels")),
        Ignore("only transformers' head for classes of tokens reads it", ("hidden_dropout",)),
    ),
    rules=lambda hf: (
        *decoder(NORMS, NORM_BIAS, GQA, QKV_BIAS, O_BIAS, mlp("up_proj", "down_proj")),
        *FINAL_BIAS,
    ),
)
