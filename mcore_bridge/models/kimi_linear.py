"""Kimi Linear: Kimi delta attention in most layers, latent attention without a rope in others, and routed experts.

transformers reads the sizes of Kimi delta attention from ``linear_attn_config`` of published configs, and so do
engines.
"""

from collections.abc import Mapping
from dataclasses import replace

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Const, Derive, Hf, Ignore, Map, Mcore, Require
from mcore_bridge.config.tables import LATENT, but, derived_rope, unread
from mcore_bridge.config.tables.moe import GROUPS, IF_SEVERAL, MLP_TYPES, shared_experts
from mcore_bridge.config.tables.moe_counted import COUNTED, SIGMOID_GROUPED
from mcore_bridge.config.tables.short_convolutions import layers
from mcore_bridge.errors import ConfigError, shown
from mcore_bridge.models.blocks import GATED_MLP, MLA, NORMS, SWIGLU, W123, W123_STACKS, decoder
from mcore_bridge.rules.layout import COLUMN, REPLICATED, ROW
from mcore_bridge.rules.mapping import Rules, table, under
from mcore_bridge.rules.mixer_layouts import KDA_CONV, KDA_DECAY, KDA_IN

_SIZES = {  # field: name in linear_attn_config, mcore name
    "linear_head_dim": ("head_dim", "linear_key_head_dim"),
    "linear_num_heads": ("num_heads", "linear_num_key_heads"),
    "linear_conv_kernel_dim": ("short_conv_kernel_size", "linear_conv_kernel_dim"),
}
_LISTS = {"full_attn_layers": "full_attention", "kda_layers": "linear_attention"}
_GIVEN = "linear_attn_config"


def _numbered(names: object) -> dict[str, object]:
    """The layers of each kind, numbered from 1, as published configs have them."""
    assert isinstance(names, list | tuple)
    return {key: [number for number, name in enumerate(names, 1) if name == kind] for key, kind in _LISTS.items()}


def _agreeing(hf: Hf) -> dict[str, object]:
    """The sizes. ``linear_attn_config``, if it is there, must say what transformers has made of it."""
    given = hf.get(_GIVEN) or {}
    own = {old: hf[name] for name, (old, _) in _SIZES.items()} | _numbered(hf.get("layer_types"))
    if not isinstance(given, Mapping) or any(name not in own or own[name] != value for name, value in given.items()):
        raise ConfigError(f"{_GIVEN} must agree with {own}, found {shown(given)}. Change it, or delete it.")
    return {mcore: hf[name] for name, (_, mcore) in _SIZES.items()}


def _agreeing_back(mcore: Mcore) -> dict[str, object]:
    sizes = {name: mcore[own] for name, (_, own) in _SIZES.items()}
    names = LAYERS.backward(mcore)["layer_types"]
    return {**sizes, _GIVEN: {old: sizes[name] for name, (old, _) in _SIZES.items()} | _numbered(names)}


def _second(hf: Hf, layer: int) -> str:
    return "E" if MLP_TYPES.forward(hf)["moe_layer_freq"][layer] else "-"  # type: ignore[index]


def _called(entry: Derive, **names: str) -> Derive:
    """``entry`` with other names of HF fields; transformers accepts either name."""

    def forward(hf: Hf) -> dict[str, object]:
        return entry.forward({**{old: hf[new] for old, new in names.items() if new in hf}, **hf})

    def backward(mcore: Mcore) -> dict[str, object]:
        return {names.get(name, name): value for name, value in entry.backward(mcore).items()}

    both = dict.fromkeys((*(names.get(name, name) for name in entry.names), *entry.names))
    return Derive(tuple(both), forward, backward, entry.refuses)


LAYERS = layers(
    _second,
    MLP_TYPES.backward,
    *MLP_TYPES.names,
    letters={"linear_attention": "K", "full_attention": "*"},
    moe_layer_freq="E",
)
NO_ROPE = Ignore("no layer has a rope", derived_rope.ROPE.names)
ONE_FORM = tuple(
    Require(name, (value, None), "transformers computes this for any value")
    for name, value in {
        "mla_use_nope": True,
        "moe_router_activation_func": "sigmoid",
        "use_grouped_topk": True,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
    }.items()
)
# fmt: off
KDA: Rules = under("self_attention", "self_attn", table(
    ("in_proj.weight",                    "{q,k,v,b,f_a,g_a}_proj.weight",                  KDA_IN),
    ("conv1d.weight",                     "{q,k,v}_conv1d.weight",                          KDA_CONV),
    ("decay_up.weight",                   "f_b_proj.weight",                                COLUMN),
    ("gate_up.weight",                    "g_b_proj.weight",                                COLUMN),
    ("dt_bias",                           "dt_bias",                                        COLUMN),
    ("A_log",                             "A_log",                                          KDA_DECAY),
    ("out_norm.weight",                   "o_norm.weight",                                  REPLICATED),
    ("out_proj.weight",                   "o_proj.weight",                                  ROW)))
SHARED_AND_BIAS = (*under("shared_experts", "shared_experts", GATED_MLP), *table(
    ("router.expert_bias",                "gate.e_score_correction_bias",                   REPLICATED)))
# fmt: on
SPARSE = (*W123, *under("mlp", "block_sparse_moe", SHARED_AND_BIAS))
SAVED_BY_TRANSFORMERS = tuple(
    replace(rule, copy=True, exported=False)
    for rule in under("decoder.layers.*.mlp", "model.layers.*.block_sparse_moe", GATED_MLP)
)
"""transformers reads dense MLPs under either name, and writes them under this one, which engines do not read."""
ARCHITECTURE = Architecture(
    model_type="kimi_linear",
    fields=but(
        (*LATENT, *COUNTED, *SIGMOID_GROUPED),
        LAYERS,
        Derive((*_SIZES, _GIVEN), _agreeing, _agreeing_back),
        Map("model_max_length", "max_sequence_length"),
        Map("num_experts", "num_moe_experts"),
        Map("num_experts_per_token", "moe_router_topk"),
        shared_experts("num_shared_experts"),
        _called(GROUPS, n_group="num_expert_group", num_experts_per_tok="num_experts_per_token"),
        _called(IF_SEVERAL, norm_topk_prob="moe_renormalize", num_experts_per_tok="num_experts_per_token"),
        NO_ROPE,
        Const("position_embedding_type", "none"),
        *ONE_FORM,
        unread("head_dim"),
    ),
    rules=lambda hf: (*decoder(NORMS, MLA, KDA, SWIGLU, SPARSE), *SAVED_BY_TRANSFORMERS),
    renamed_in_memory=(
        *W123_STACKS,
        (".block_sparse_moe.shared_experts.", ".mlp.shared_experts."),
        (".self_attn.f_a_proj", ".self_attn.forget_gate.f_a_proj"),
    ),
)
