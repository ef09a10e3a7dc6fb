"""The config table, with its entries, of models with linear attention (the gated delta rule) in some layers."""

from mcore_bridge.config.fields import Const, Derive, Field, Hf, Ignore, Map, Mcore, Require, count
from mcore_bridge.config.layer_kinds import layers_but_full
from mcore_bridge.config.rope_spelling import MULTIMODAL
from mcore_bridge.config.tables import BIAS_ATTENTION, QK_NORMED, WINDOW_NEVER
from mcore_bridge.config.tables.derived_rope import rope
from mcore_bridge.config.tables.moe import MTP_ON_REQUEST
from mcore_bridge.errors import ConfigError

_KINDS = ("full_attention", "linear_attention")


def _linear(hf: Hf) -> dict[str, object]:
    kinds, num_layers = hf.get("layer_types"), count(hf, "num_hidden_layers")
    if not isinstance(kinds, list) or len(kinds) != num_layers or set(kinds) - set(_KINDS):
        raise ConfigError(
            f"layer_types must name one of {_KINDS} for each of the {num_layers} layers, found {kinds!r}."
        )
    if "linear_attention" not in kinds:
        return {"experimental_attention_variant": None, "linear_attention_freq": None}
    if hf.get("hidden_act") not in ("silu", "swish"):
        raise ConfigError(
            f"hidden_act must be 'silu' in a model with linear attention, found {hf.get('hidden_act')!r}: with others, "
            "transformers 4.57 and 5 differ in the activation of the convolution, and fused kernels have none."
        )
    freq = [int(kind == "linear_attention") for kind in kinds]
    return {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": freq}


def _linear_back(mcore: Mcore) -> dict[str, object]:
    return {"layer_types": [_KINDS[kind] for kind in layers_but_full(mcore, "linear_attention_freq", unset=0)]}


_REFUSED = (
    "`layer_types` other than `full_attention` and `linear_attention`: layers differ only by their attention",
    "`hidden_act` other than SiLU in layers of linear attention: transformers 4.57 and 5 disagree on the convolution",
)
LINEAR_LAYERS = Derive(("layer_types",), _linear, _linear_back, _REFUSED)


_SIZES = (
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    "linear_conv_kernel_dim",
)
DELTA: tuple[Field, ...] = (
    LINEAR_LAYERS,
    *(Map(name, name) for name in _SIZES),
    *(*BIAS_ATTENTION, *WINDOW_NEVER, *QK_NORMED),
    rope(own=("partial_rotary_factor", *MULTIMODAL)),
    Const("layernorm_zero_centered_gamma", True),  # of all norms except the norm of linear attention
    Const("attention_output_gate", True),
    Require("attn_output_gate", (True,), "full attention always has an output gate in transformers"),
    Require("output_gate_type", ("swish",), "linear attention has a gate of silu (swish) in transformers"),
    Ignore("transformers has made layer_types of it", ("full_attention_interval",)),
    Ignore("it only affects inference engines; in training the state is always in fp32", ("mamba_ssm_dtype",)),
    MTP_ON_REQUEST,
    Require("mtp_use_dedicated_embeddings", (False, None), "MTP layers of GPTModel share the embedding"),
)
"""Linear attention in some layers, full attention with an output gate in the other layers."""
NO_MIXED_MLP = Require(
    "mlp_only_layers", ([], None), "transformers gives each layer of this family the same kind of MLP"
)
