"""Command A with experts: a cohere2 with routed experts, a rope in dense layers, and RMSNorms or LayerNorms."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Const, Derive, Hf, Ignore, Mcore, Require, count
from mcore_bridge.config.layer_kinds import layers_of
from mcore_bridge.config.tables import (
    BIAS_ATTENTION,
    DECODER,
    INTERLEAVED,
    ONE_NORM,
    QK_PLAIN,
    SCALED_LOGITS,
    but,
    derived,
    without,
)
from mcore_bridge.config.tables.moe import MLP_TYPES, ROUTED
from mcore_bridge.errors import ConfigError
from mcore_bridge.models.blocks import GQA, MOE, O_BIAS, QKV_BIAS, SHARED, SWIGLU, decoder
from mcore_bridge.models.blocks import ONE_NORM as NORM_RULES

# Entries for Command A with experts: norm, sizes of MLPs, choice and sum of experts, and layers that have a rope.


def _norm(hf: Hf) -> dict[str, object]:
    rms = hf.get("rms_norm_eps") is not None
    epsilon = hf["rms_norm_eps" if rms else "layer_norm_eps"]
    return {"normalization": "RMSNorm" if rms else "LayerNorm", "layernorm_epsilon": epsilon, "norm_bias": False}


def _norm_back(mcore: Mcore) -> dict[str, object]:
    rms, epsilon = mcore["normalization"] == "RMSNorm", mcore["layernorm_epsilon"]
    return {"rms_norm_eps": epsilon} if rms else {"rms_norm_eps": None, "layer_norm_eps": epsilon}


def _sizes(hf: Hf) -> dict[str, object]:
    """Sizes of MLPs. Routed and shared experts have ``intermediate_size``; dense MLPs may have a separate size."""
    size, shared = count(hf, "intermediate_size"), hf.get("num_shared_experts") or 0
    assert isinstance(shared, int)
    dense = hf.get("prefix_dense_intermediate_size")
    return {
        "ffn_hidden_size": size if dense is None else dense,
        "moe_ffn_hidden_size": size,
        "moe_shared_expert_intermediate_size": shared * size or None,
    }


def _sizes_back(mcore: Mcore) -> dict[str, object]:
    size, shared = count(mcore, "moe_ffn_hidden_size"), mcore["moe_shared_expert_intermediate_size"] or 0
    assert isinstance(shared, int)
    if shared % size:
        raise ConfigError(f"moe_shared_expert_intermediate_size={shared} must be a multiple of {size}, as HF counts.")
    return {
        "intermediate_size": size,
        "prefix_dense_intermediate_size": mcore["ffn_hidden_size"],
        "num_shared_experts": shared // size,
    }


def _combined(hf: Hf) -> dict[str, object]:
    how = hf.get("shared_expert_combination_strategy")
    if how not in ("sum", "average"):
        raise ConfigError(f"shared_expert_combination_strategy must be 'sum' or 'average', found {how!r}.")
    return {"expert_multiplier": 0.5 if how == "average" and hf.get("num_shared_experts") else 1.0}


def _combined_back(mcore: Mcore) -> dict[str, object]:
    return {"shared_expert_combination_strategy": "average" if mcore["expert_multiplier"] == 0.5 else "sum"}


def _selected(hf: Hf) -> dict[str, object]:
    how, several = hf.get("expert_selection_fn"), count(hf, "num_experts_per_tok") > 1
    if how not in ("softmax", "sigmoid"):
        raise ConfigError(f"expert_selection_fn must be 'softmax' or 'sigmoid', found {how!r}.")
    if how == "sigmoid" and hf.get("norm_topk_prob") is not several:
        raise ConfigError(
            f"norm_topk_prob must be {several} with sigmoid scores, found {hf.get('norm_topk_prob')!r}: "
            "megatron-core normalises the weights of several experts, and does not change the weight of a single "
            "expert."
        )
    return {"moe_router_score_function": how}


def _selected_back(mcore: Mcore) -> dict[str, object]:
    return {"expert_selection_fn": mcore["moe_router_score_function"], "norm_topk_prob": mcore["moe_router_topk"] != 1}


def _turned(hf: Hf) -> dict[str, object]:
    """Windows, and the layers without a rope, which have experts and no window."""
    windows = derived.WINDOWS.forward(hf)
    kinds, mlps = hf["layer_types"], hf.get("mlp_layer_types")
    assert isinstance(kinds, list)
    assert isinstance(mlps, list)
    still = [int(kind != "sliding_attention" and mlp != "dense") for kind, mlp in zip(kinds, mlps, strict=True)]
    return {**windows, "no_rope_freq": still if any(still) else None}


def _turned_back(mcore: Mcore) -> dict[str, object]:
    fields = derived.WINDOWS.backward(mcore)
    mlps = ["sparse" if sparse else "dense" for sparse in layers_of(mcore)]
    expected = _turned({**fields, "num_hidden_layers": mcore["num_layers"], "mlp_layer_types": mlps})["no_rope_freq"]
    if mcore["no_rope_freq"] != expected:
        raise ConfigError(
            f"no_rope_freq must be {expected}: here only layers with experts and without a window have no rope; "
            f"found {mcore['no_rope_freq']!r}. Remove the override."
        )
    return fields


# fmt: off
NORM     = Derive(("rms_norm_eps", "layer_norm_eps"), _norm, _norm_back)
SIZES    = Derive(("intermediate_size", "prefix_dense_intermediate_size", "num_shared_experts"), _sizes, _sizes_back)
COMBINED = Derive(("shared_expert_combination_strategy",), _combined, _combined_back, (
    "`shared_expert_combination_strategy` other than `sum` and `average`: transformers computes no other",))
SELECTED = Derive(("expert_selection_fn", "norm_topk_prob"), _selected, _selected_back, (
    "`expert_selection_fn` other than `softmax` and `sigmoid`: transformers computes no other",
    "sigmoid scores of several experts that are not normalised, or of one that is: megatron-core normalises several",))
TURNED   = Derive(derived.WINDOWS.names, _turned, _turned_back, derived.WINDOWS.refuses)
# fmt: on

ROUTER = (Const("moe_router_enable_expert_bias", False), Const("moe_router_pre_softmax", False))
OWN = (
    Const("moe_shared_expert_gate", False),
    Require("prefix_dense_sliding_window_pattern", (1,), "dense layers would have no rope; nobody has written this"),
    Ignore("transformers has made layer_types of it", ("sliding_window_pattern",)),
)
ARCHITECTURE = Architecture(
    model_type="cohere2_moe",
    fields=(
        *(
            *but(without(DECODER, "normalization"), *INTERLEAVED, NORM, SIZES),
            *BIAS_ATTENTION,
            TURNED,
            *QK_PLAIN,
            *ONE_NORM,
            *SCALED_LOGITS,
        ),
        *(*ROUTED, *ROUTER, SELECTED, COMBINED, MLP_TYPES, *OWN),
    ),
    rules=lambda hf: decoder(NORM_RULES, GQA, QKV_BIAS, O_BIAS, SWIGLU, MOE, SHARED),
)
