"""Entries of config tables for models whose layers are of several kinds: mixers, attention, MLPs, experts."""

from mcore_bridge.config.fields import Derive, Hf, Mcore, count
from mcore_bridge.config.tables.moe import layers_of
from mcore_bridge.errors import ConfigError

_KINDS = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
"""The kinds of layers in HF, each with its letter in ``layer_kinds``, as in megatron-core's hybrid models."""
FIRST, SECOND = frozenset("M*"), frozenset("-E")
"""Kinds of the first half of a layer (mixer, attention) and of its second half (MLP, experts)."""
_NAMES = {kind: name for name, kind in _KINDS.items()}


def kept_kinds(mcore: Mcore, name: str) -> tuple[str, ...]:
    """The kinds of the first ``num_layers`` layers. Raise if the HF field ``name`` has fewer."""
    num_layers, kinds = count(mcore, "num_layers"), mcore["layer_kinds"]
    assert isinstance(kinds, tuple)
    if num_layers > len(kinds):
        raise ConfigError(
            f"num_layers must be at most {len(kinds)}, the number of kinds of layers in the HF config, found "
            f"{num_layers}. Change {name} of the HF config instead."
        )
    return kinds[:num_layers]


def _layers(hf: Hf) -> dict[str, object]:
    names = hf.get("layers_block_type")
    if not isinstance(names, list | tuple) or not names or set(names) - _KINDS.keys():
        raise ConfigError(f"layers_block_type must name one of {sorted(_KINDS)} for each layer, found {names!r}.")
    kinds = tuple(_KINDS[name] for name in names)
    sparse = [int(kind == "E") for kind in kinds]
    return {
        "num_layers": len(kinds),
        "layer_kinds": kinds,
        "moe_layer_freq": sparse,
        "num_moe_experts": count(hf, "n_routed_experts") if any(sparse) else None,
        "moe_ffn_hidden_size": count(hf, "moe_intermediate_size") if any(sparse) else None,
    }


def _layers_back(mcore: Mcore) -> dict[str, object]:
    kinds, experts = kept_kinds(mcore, "layers_block_type"), mcore["num_moe_experts"]
    sparse = [int(kind == "E") for kind in kinds]
    if experts is not None and layers_of(mcore) != sparse:
        raise ConfigError(f"moe_layer_freq must be {sparse}, as layers_block_type says. Remove the override.")
    names: dict[str, object] = {"layers_block_type": [_NAMES[kind] for kind in kinds]}
    if experts is None:
        return names
    return {**names, "n_routed_experts": experts, "moe_intermediate_size": mcore["moe_ffn_hidden_size"]}


def _time_steps(hf: Hf) -> dict[str, object]:
    limits = hf.get("time_step_limit", (0.0, float("inf")))
    low, high = limits if isinstance(limits, list | tuple) and len(limits) == 2 else (None, None)
    if low != 0 or not isinstance(high, float) or not high > 1e30:  # also 1e308, which some configs have for infinity
        raise ConfigError(
            f"time_step_limit must be [0, Infinity], found {limits!r}: megatron-core's kernel, vLLM and SGLang do not "
            "clamp time steps. Set it to that if the model may be trained and served so."
        )
    return {}


def _head_dim(hf: Hf) -> dict[str, object]:
    given, expected = hf.get("attention_head_dim"), hf.get("head_dim")
    if given not in (None, expected):
        raise ConfigError(
            f"attention_head_dim must be head_dim={expected!r}, found {given!r}: transformers reads only head_dim. Set "
            "head_dim to the value of training, and delete attention_head_dim."
        )
    return {}


def _narrow(hf: Hf) -> dict[str, object]:
    narrow = hf.get("moe_latent_size") is not None
    return {"expert_latent_size": count(hf, "moe_latent_size") if narrow else None}


def _mtp_layers(hf: Hf) -> dict[str, object]:
    names = hf.get("mtp_layers_block_type")
    known = names if isinstance(names, list | tuple) else ()
    return {"mtp_kinds": "".join(_KINDS.get(name, "?") for name in known)}


LAYERS = Derive(
    ("layers_block_type", "n_routed_experts", "moe_intermediate_size", "num_hidden_layers"),
    _layers,
    _layers_back,
    ("`layers_block_type` other than `linear_attention`, `full_attention`, `mlp` and `moe`: transformers has no more",),
)
TIME_STEPS = Derive(
    ("time_step_limit",),
    _time_steps,
    lambda mcore: {},
    ("`time_step_limit` other than `[0, Infinity]`: neither megatron-core's kernel nor engines clamp time steps",),
)
HEAD_DIM = Derive(
    ("attention_head_dim",),
    _head_dim,
    lambda mcore: {},
    ("`attention_head_dim` other than `head_dim`: only `head_dim` is read",),
)
MTP_LAYERS = Derive(("mtp_layers_block_type",), _mtp_layers, lambda mcore: {})
NARROW = Derive(("moe_latent_size",), _narrow, lambda mcore: {"moe_latent_size": mcore["expert_latent_size"]})
