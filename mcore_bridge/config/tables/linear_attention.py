"""The config table, with its entries, of models with linear attention (the gated delta rule) in some layers."""

from collections.abc import Mapping

from torch.nn.functional import silu

from mcore_bridge.config.fields import Const, Derive, Field, Hf, Ignore, Map, Mcore, Require, count, is_number
from mcore_bridge.config.layer_kinds import layers_but_full, sizes_by_layer
from mcore_bridge.config.rope_spelling import MULTIMODAL
from mcore_bridge.config.tables import BIAS_ATTENTION, QK_NORMED, QK_NORMED_TOGETHER, WINDOW_NEVER
from mcore_bridge.config.tables.derived_rope import POSITIONS_IF_BASE, rope
from mcore_bridge.config.tables.moe import MLP_TYPES, MTP_ON_REQUEST
from mcore_bridge.config.tables.short_convolutions import layers
from mcore_bridge.errors import ConfigError, shown

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
SIZES: tuple[Field, ...] = tuple(Map(name, name) for name in _SIZES)
DELTA: tuple[Field, ...] = (
    *(LINEAR_LAYERS, *SIZES),
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


def _norms_by_kind(hf: Hf) -> dict[str, object]:
    layers, before = LINEAR_LAYERS.forward(hf), {"norm_placement": "pre"}
    kinds = layers["linear_attention_freq"] or [0] * count(hf, "num_hidden_layers")
    assert isinstance(kinds, list)
    own = sizes_by_layer([before if linear else {} for linear in kinds], {"norm_placement": "post"})
    return {**layers, "norm_placement": "post", "per_layer_config": own}


DELTA_NORMED_BEFORE: tuple[Field, ...] = (
    Derive(LINEAR_LAYERS.names, _norms_by_kind, LINEAR_LAYERS.backward, LINEAR_LAYERS.refuses),
    *(*SIZES, Map("linear_allow_neg_eigval", "delta_negative_eigenvalues"), Const("head_norm_epsilon", 1e-5)),
    *(*BIAS_ATTENTION, *WINDOW_NEVER, *QK_NORMED_TOGETHER, POSITIONS_IF_BASE),
    Ignore(
        "only initial values depend on them",
        ("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor"),
    ),
)
"""Linear attention behind its norm in some layers, and full attention before its norm in the other layers."""
NO_MIXED_MLP = Require(
    "mlp_only_layers", ([], None), "transformers gives each layer of this family the same kind of MLP"
)

_KDA_SIZES = {  # field: name in linear_attn_config, mcore name
    "linear_head_dim": ("head_dim", "linear_key_head_dim"),
    "linear_num_heads": ("num_heads", "linear_num_key_heads"),
    "linear_conv_kernel_dim": ("short_conv_kernel_size", "linear_conv_kernel_dim"),
}
_KDA_LISTS = {"full_attn_layers": "full_attention", "kda_layers": "linear_attention"}
_KDA_GIVEN = "linear_attn_config"


def _numbered(names: object) -> dict[str, object]:
    """The layers of each kind, numbered from 1, as published configs have them."""
    assert isinstance(names, list | tuple)
    return {key: [number for number, name in enumerate(names, 1) if name == kind] for key, kind in _KDA_LISTS.items()}


def _agreeing(hf: Hf) -> dict[str, object]:
    """The sizes. ``linear_attn_config``, if it is there, must say what transformers has made of it."""
    given = hf.get(_KDA_GIVEN) or {}
    own = {old: hf[name] for name, (old, _) in _KDA_SIZES.items()} | _numbered(hf.get("layer_types"))
    if not isinstance(given, Mapping) or any(name not in own or own[name] != value for name, value in given.items()):
        raise ConfigError(f"{_KDA_GIVEN} must agree with {own}, found {shown(given)}. Change it, or delete it.")
    return {mcore: hf[name] for name, (_, mcore) in _KDA_SIZES.items()}


def _agreeing_back(mcore: Mcore) -> dict[str, object]:
    sizes = {name: mcore[own] for name, (_, own) in _KDA_SIZES.items()}
    names = KDA_LAYERS.backward(mcore)["layer_types"]
    return {**sizes, _KDA_GIVEN: {old: sizes[name] for name, (old, _) in _KDA_SIZES.items()} | _numbered(names)}


def _second(hf: Hf, layer: int) -> str:
    return "E" if MLP_TYPES.forward(hf)["moe_layer_freq"][layer] else "-"  # type: ignore[index]


KDA_LAYERS = layers(
    _second,
    MLP_TYPES.backward,
    *MLP_TYPES.names,
    letters={"linear_attention": "K", "full_attention": "*"},
    moe_layer_freq="E",
)
KDA: tuple[Field, ...] = (
    *(KDA_LAYERS, Const("activation_func", silu)),
    Require(
        "hidden_act", ("silu",), "the convolution has the activation of MLPs, and fused kernels know this one alone"
    ),
    Map("model_max_length", "max_sequence_length"),
)
"""Kimi delta attention in some layers. Another entry has its sizes."""
LOW_RANK_KDA: tuple[Field, ...] = (
    Derive((*_KDA_SIZES, _KDA_GIVEN), _agreeing, _agreeing_back),
    *(Const("kda_full_rank", False), Const("kda_rate_dims", 4), Const("kda_lower_bound", None)),
)
"""The sizes of Kimi Linear. Decay and gate have narrow inputs."""


def _bound(hf: Hf) -> dict[str, object]:
    bound = hf.get("kda_lower_bound") if hf.get("kda_safe_gate") else None
    if hf.get("kda_safe_gate") and not (is_number(bound) and bound < 0):
        raise ConfigError(f"kda_lower_bound must be a number below 0, found {shown(bound)}.")
    return {"kda_lower_bound": bound}


def _bound_back(mcore: Mcore) -> dict[str, object]:
    bound = mcore["kda_lower_bound"]
    return {"kda_safe_gate": bound is not None, **({} if bound is None else {"kda_lower_bound": bound})}


BOUNDED_KDA: tuple[Field, ...] = (
    *(Map(name, mcore) for name, (_, mcore) in _KDA_SIZES.items()),
    Derive(
        ("linear_lower_bound",),
        lambda hf: {"kda_lower_bound": hf.get("linear_lower_bound")},
        lambda mcore: {"linear_lower_bound": mcore["kda_lower_bound"]},
    ),
    *(Const("kda_full_rank", False), Const("kda_rate_dims", 1), Const("activation_func", silu)),
    layers(
        _second,
        MLP_TYPES.backward,
        *MLP_TYPES.names,
        letters={"linear_attention": "K", "indexed_attention": "*"},
        moe_layer_freq="E",
    ),
    Require(
        "hidden_act", ("silu",), "the convolution has the activation of MLPs, and fused kernels know this one alone"
    ),
    Ignore("transformers has made other fields of it", (_KDA_GIVEN,)),
)
"""Kimi delta attention of GLM-5.3, whose decay may have a bound, beside attention to selected keys."""
FULL_RANK_KDA: tuple[Field, ...] = (
    *(Map(name, mcore) for name, (_, mcore) in _KDA_SIZES.items()),
    Derive(("kda_safe_gate", "kda_lower_bound"), _bound, _bound_back),
    *(Const("kda_full_rank", True), Const("kda_rate_dims", 1)),
    Ignore(
        "transformers has made layer_types, linear_head_dim and linear_conv_kernel_dim of them",
        ("layer_group_size", "head_dim", "short_conv_kernel_size"),
    ),
)
"""The sizes of Ling 3. Decay and gate have one projection each, and decay may have a bound."""
