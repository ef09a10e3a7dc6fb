"""Config tables of families whose layers have a Mamba-2 mixer, attention or both, and then an MLP or experts."""

from mcore_bridge.config.fields import Derive, Field, Hf, Ignore, Map, Mcore, Require, count
from mcore_bridge.config.rope_spelling import speaks_rope_parameters
from mcore_bridge.config.tables.derived_rope import ROPE
from mcore_bridge.errors import ConfigError

_KINDS = {"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*"}
"""The letter of the first half of a layer in ``layer_kinds``, by its name in transformers 4 or 5."""


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


def _time_steps(hf: Hf) -> dict[str, object]:
    limits = hf.get("time_step_limit", (0.0, float("inf")))
    low, high = limits if isinstance(limits, list | tuple) and len(limits) == 2 else (None, None)
    if low != 0 or not isinstance(high, float) or not high > 1e30:  # also 1e308, which some configs have for infinity
        raise ConfigError(
            f"time_step_limit must be [0, Infinity], found {limits!r}: megatron-core's kernel, vLLM and SGLang do not "
            "clamp time steps. Set it to that if the model may be trained and served so."
        )
    return {}


TIME_STEPS = Derive(
    ("time_step_limit",),
    _time_steps,
    lambda mcore: {},
    ("`time_step_limit` other than `[0, Infinity]`: neither megatron-core's kernel nor engines clamp time steps",),
)
MIXER: tuple[Field, ...] = (
    *(Map("mamba_n_heads", "mamba_num_heads"), Map("mamba_d_head", "mamba_head_dim")),
    *(Map("mamba_d_state", "mamba_state_dim"), Map("mamba_d_conv", "mamba_conv_kernel"), TIME_STEPS),
    Require("mamba_conv_bias", (True,), "megatron-core's checkpoints have this bias"),
    Require("mamba_proj_bias", (False,), "megatron-core's mixer has no bias in its projections"),
    Ignore("transformers requires the number of heads times their size", ("mamba_expand",)),
    Ignore("the result does not depend on it", ("mamba_chunk_size",)),
)
"""The sizes of mixers. The architecture adds the number of groups."""


def _sparse(hf: Hf) -> bool:
    return bool(hf.get("num_local_experts"))


def _layers(hf: Hf) -> dict[str, object]:
    num_layers, names = count(hf, "num_hidden_layers"), hf.get("layer_types")
    names = ["mamba"] * num_layers if names is None else names  # the default of transformers 4
    if not isinstance(names, list | tuple) or len(names) != num_layers or set(names) - _KINDS.keys():
        raise ConfigError(f"layer_types must name one of {sorted(_KINDS)} for each layer, found {names!r}.")
    second = "E" if _sparse(hf) else "-"
    return {"num_layers": num_layers, "layer_kinds": tuple(_KINDS[name] + second for name in names)}


def _layers_back(mcore: Mcore) -> dict[str, object]:
    kinds = kept_kinds(mcore, "layer_types")
    mixer, attention = ("linear_attention", "full_attention") if speaks_rope_parameters() else ("mamba", "attention")
    names = [mixer if "M" in kind else attention for kind in kinds]
    return {"layer_types": names, "num_hidden_layers": len(names)}


def _sizes(hf: Hf) -> dict[str, object]:
    """In a model without experts, the fields of the shared expert describe the MLP."""
    own, shared = count(hf, "intermediate_size"), count(hf, "shared_intermediate_size")
    experts = count(hf, "num_local_experts") if _sparse(hf) else None
    return {
        "num_moe_experts": experts,
        "moe_router_topk": count(hf, "num_experts_per_tok") if experts else 2,  # megatron-core's default
        "ffn_hidden_size": own if experts else shared,
        "moe_ffn_hidden_size": own if experts else None,
        "moe_shared_expert_intermediate_size": shared if experts else None,
    }


def _sizes_back(mcore: Mcore) -> dict[str, object]:
    if mcore["num_moe_experts"] is None:
        return {"num_local_experts": 0, "shared_intermediate_size": mcore["ffn_hidden_size"]}
    if mcore["ffn_hidden_size"] != mcore["moe_ffn_hidden_size"]:
        raise ConfigError(
            "ffn_hidden_size must be moe_ffn_hidden_size: HF has one intermediate_size. Remove overrides."
        )
    return {
        "num_local_experts": mcore["num_moe_experts"],
        "num_experts_per_tok": mcore["moe_router_topk"],
        "intermediate_size": mcore["moe_ffn_hidden_size"],
        "shared_intermediate_size": mcore["moe_shared_expert_intermediate_size"],
    }


def _positions(hf: Hf) -> dict[str, object]:
    """Any name but "rope" means that attention has no rope, as in transformers and in vLLM."""
    if hf.get("position_embedding_type") == "rope":
        return {"position_embedding_type": "rope", **ROPE.to_mcore(hf)}
    return {"position_embedding_type": "none"}


def _positions_back(mcore: Mcore) -> dict[str, object]:
    if mcore["position_embedding_type"] == "rope":
        return {"position_embedding_type": "rope", **ROPE.to_hf(mcore)}
    return {"position_embedding_type": "nope"}


LAYERS = Derive(
    ("layer_types", "num_hidden_layers"),
    _layers,
    _layers_back,
    ("`layer_types` other than `linear_attention` and `full_attention`: transformers has no other",),
)
SIZES = Derive(
    ("num_local_experts", "num_experts_per_tok", "intermediate_size", "shared_intermediate_size"), _sizes, _sizes_back
)
POSITIONS = Derive(("position_embedding_type", *ROPE.names), _positions, _positions_back, ROPE.refuses)
