"""The config table, with its entries, of models with linear attention (the gated delta rule) in some layers."""

from collections.abc import Mapping

from mcore_bridge.config.fields import Const, Derive, Field, Hf, Ignore, Map, Mcore, Require, count, is_number
from mcore_bridge.config.layer_kinds import layers_but_full, sizes_by_layer
from mcore_bridge.config.rope_spelling import MULTIMODAL
from mcore_bridge.config.tables import BIAS_ATTENTION, QK_NORMED, QK_NORMED_TOGETHER, SILU_ONLY, WINDOW_NEVER, but
from mcore_bridge.config.tables.derived_rope import POSITIONS_IF_BASE, rope
from mcore_bridge.config.tables.moe import MLP_TYPES, MTP_NEVER, MTP_ON_REQUEST
from mcore_bridge.config.tables.short_convolutions import layers
from mcore_bridge.config.tables.sparse_attention import MEAN_POOLS
from mcore_bridge.errors import ConfigError, shown

_LINEAR = "linear_attention"


def _linear(hf: Hf, full: str) -> dict[str, object]:
    kinds, num_layers, known = hf.get("layer_types"), count(hf, "num_hidden_layers"), (full, _LINEAR)
    if not isinstance(kinds, list) or len(kinds) != num_layers or set(kinds) - set(known):
        raise ConfigError(f"layer_types must name one of {known} for each of the {num_layers} layers, found {kinds!r}.")
    if _LINEAR not in kinds:
        return {"experimental_attention_variant": None, "linear_attention_freq": None}
    if hf.get("hidden_act") not in ("silu", "swish"):
        raise ConfigError(
            f"hidden_act must be 'silu' in a model with linear attention, found {hf.get('hidden_act')!r}: with others, "
            "transformers 4.57 and 5 differ in the activation of the convolution, and fused kernels have none."
        )
    freq = [int(kind == _LINEAR) for kind in kinds]
    return {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": freq}


def _linear_layers(full: str) -> Derive:
    """The entry of the kinds of layers, from the name of those without linear attention."""

    def forward(hf: Hf) -> dict[str, object]:
        return _linear(hf, full)

    def backward(mcore: Mcore) -> dict[str, object]:
        return {"layer_types": [(full, _LINEAR)[kind] for kind in layers_but_full(mcore, _FREQ, unset=0)]}

    refused = (
        f"`layer_types` other than `{full}` and `linear_attention`: layers differ only by their attention",
        "`hidden_act` other than SiLU in layers of linear attention: transformers 4.57 and 5 disagree on the "
        "convolution",
    )
    return Derive(("layer_types",), forward, backward, refused)


_FREQ = "linear_attention_freq"
LINEAR_LAYERS = _linear_layers("full_attention")


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


def _delta_gate(hf: Hf) -> dict[str, object]:
    gate = hf.get("output_gate_type") or hf.get("hidden_act")
    if gate not in ("silu", "sigmoid"):
        raise ConfigError(f"output_gate_type must be None, 'silu' or 'sigmoid', found {shown(gate)}.")
    return {"delta_gate_activation": gate}


DELTA_INDEXED: tuple[Field, ...] = (
    *but(
        DELTA,
        _linear_layers("indexed_attention"),
        Derive(("output_gate_type",), _delta_gate, lambda mcore: {"output_gate_type": mcore["delta_gate_activation"]}),
        MTP_NEVER,
    ),
    *MEAN_POOLS,
)
"""Linear attention in some layers, and gated attention to pools of keys in the other layers."""


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
_GIVEN, _LISTS = "linear_attn_config", ("full_attn_layers", "kda_layers")


def _second(hf: Hf, layer: int) -> str:
    return "E" if MLP_TYPES.forward(hf)["moe_layer_freq"][layer] else "-"  # type: ignore[index]


def _kinds(attention: str) -> Derive:
    """The entry of the kinds of layers, from the name of those without Kimi delta attention."""
    letters = {"linear_attention": "K", attention: "*"}
    return layers(_second, MLP_TYPES.backward, *MLP_TYPES.names, letters=letters, moe_layer_freq="E")


def _numbered(names: object, first: int) -> dict[str, object]:
    """The layers of each kind, as published configs have them, if the first layer has the number ``first``."""
    assert isinstance(names, list | tuple)
    linear = [number for number, name in enumerate(names, first) if name == "linear_attention"]
    others = [number for number in range(first, first + len(names)) if number not in linear]
    return {"full_attn_layers": others, "kda_layers": linear}


def _below_zero(hf: Hf, name: str) -> float:
    bound = hf.get(name)
    if not (is_number(bound) and bound < 0):
        raise ConfigError(f"{name} must be a number below 0, found {shown(bound)}.")
    return bound


def _narrow(kinds: Derive, first: int, bound: str = "") -> Derive:
    """The entry of the sizes of Kimi delta attention with narrow inputs, and of the bound of its decay.

    ``linear_attn_config``, if it is there, must say what transformers has made of it.

    Args:
        kinds: the entry of the kinds of layers.
        first: the number of the first layer in ``linear_attn_config``.
        bound: the field with the bound, which may be None. Empty: there is none.
    """

    def expected(hf: Hf) -> dict[str, object]:
        own = {old: hf[name] for name, (old, _) in _KDA_SIZES.items()} | _numbered(hf.get("layer_types"), first)
        return own | ({"gate_lower_bound": hf[bound], "safe_gate": hf[bound] is not None} if bound else {})

    def forward(hf: Hf) -> dict[str, object]:
        given, own = hf.get(_GIVEN) or {}, expected(hf)
        if not isinstance(given, Mapping) or any(name not in own or own[name] != given[name] for name in given):
            absent = [name for name in _LISTS if isinstance(given, Mapping) and name not in given]
            lacks = len(absent) == 1 and f"have {absent[0]}, too, as transformers ignores one list of layers alone"
            raise ConfigError(
                f"{_GIVEN} must {lacks or f'agree with {own}'}, found {shown(given)}. Change it, or delete it."
            )
        mcore: dict[str, object] = {mcore_name: hf[name] for name, (_, mcore_name) in _KDA_SIZES.items()}
        if bound:
            mcore["kda_lower_bound"] = None if hf[bound] is None else _below_zero(hf, bound)
        return mcore

    def backward(mcore: Mcore) -> dict[str, object]:
        own = {name: mcore[mcore_name] for name, (_, mcore_name) in _KDA_SIZES.items()}
        own |= {bound: mcore["kda_lower_bound"]} if bound else {}
        return {**own, _GIVEN: expected({**own, **kinds.backward(mcore)})}

    return Derive((*_KDA_SIZES, _GIVEN, *([bound] if bound else [])), forward, backward)


KDA_LAYERS, KDA_AND_INDEXED = _kinds("full_attention"), _kinds("indexed_attention")
KDA: tuple[Field, ...] = (KDA_LAYERS, *SILU_ONLY, Map("model_max_length", "max_sequence_length"))
"""Kimi delta attention in some layers. Another entry has its sizes."""
LOW_RANK_KDA: tuple[Field, ...] = (
    _narrow(KDA_LAYERS, first=1),
    *(Const("kda_full_rank", False), Const("kda_rate_dims", 4), Const("kda_lower_bound", None)),
)
"""The sizes of Kimi Linear. Decay and gate have narrow inputs."""
BOUNDED_KDA: tuple[Field, ...] = (
    *(KDA_AND_INDEXED, *SILU_ONLY, _narrow(KDA_AND_INDEXED, first=0, bound="linear_lower_bound")),
    *(Const("kda_full_rank", False), Const("kda_rate_dims", 1)),
)
"""Kimi delta attention of GLM-5.3, whose decay may have a bound, beside attention to selected keys."""


def _bound(hf: Hf) -> dict[str, object]:
    return {"kda_lower_bound": _below_zero(hf, "kda_lower_bound") if hf.get("kda_safe_gate") else None}


def _bound_back(mcore: Mcore) -> dict[str, object]:
    bound = mcore["kda_lower_bound"]
    return {"kda_safe_gate": bound is not None, **({} if bound is None else {"kda_lower_bound": bound})}


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
