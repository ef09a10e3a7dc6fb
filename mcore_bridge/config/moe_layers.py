"""Tables of DeepSeek's experts and those like them: dense layers first, counted shared experts, groups of experts."""

from mcore_bridge.config.fields import Const, Derive, Field, Hf, Ignore, Map, Mcore, Preset, Require, count
from mcore_bridge.config.moe import ROUTED, layers_of
from mcore_bridge.errors import ConfigError

_KINDS = ("dense", "sparse")


def _leading_dense(hf: Hf) -> dict[str, object]:
    dense = hf.get("first_k_dense_replace") or 0
    assert isinstance(dense, int)
    return {"moe_layer_freq": [int(layer >= dense) for layer in range(count(hf, "num_hidden_layers"))]}


def _leading_dense_back(mcore: Mcore) -> dict[str, object]:
    layers = layers_of(mcore)
    dense = layers.count(0)
    if any(layers[:dense]):
        raise ConfigError(f"moe_layer_freq must have its dense layers first, as first_k_dense_replace says: {layers}.")
    return {"first_k_dense_replace": dense}


def _listed(hf: Hf) -> dict[str, object]:
    kinds, num_layers = hf.get("mlp_layer_types"), count(hf, "num_hidden_layers")
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(kinds) <= set(_KINDS):
        raise ConfigError(
            f"mlp_layer_types must say of each of the {num_layers} layers one of {_KINDS}, found {kinds!r}."
        )
    layers = [_KINDS.index(kind) for kind in kinds]
    if "first_k_dense_replace" in hf and _leading_dense(hf)["moe_layer_freq"] != layers:
        raise ConfigError(
            f"first_k_dense_replace={hf['first_k_dense_replace']!r} must agree with mlp_layer_types, which "
            f"transformers reads instead, found {kinds}. Correct mlp_layer_types."
        )
    return {"moe_layer_freq": layers}


def _listed_back(mcore: Mcore) -> dict[str, object]:
    return {"mlp_layer_types": [_KINDS[sparse] for sparse in layers_of(mcore)]}


def _shared(hf: Hf) -> dict[str, object]:
    size, number = count(hf, "moe_intermediate_size"), count(hf, "n_shared_experts")
    return {"moe_ffn_hidden_size": size, "moe_shared_expert_intermediate_size": size * number}


def _shared_back(mcore: Mcore) -> dict[str, object]:
    size, shared = mcore["moe_ffn_hidden_size"], mcore["moe_shared_expert_intermediate_size"]
    assert isinstance(size, int)
    if not isinstance(shared, int) or shared % size:
        raise ConfigError(
            f"moe_shared_expert_intermediate_size must be a multiple of moe_ffn_hidden_size={size}, found {shared!r}: "
            "HF counts shared experts. Remove the override."
        )
    return {"moe_intermediate_size": size, "n_shared_experts": shared // size}


def _normalised(hf: Hf) -> dict[str, object]:
    wanted = count(hf, "num_experts_per_tok") > 1
    if hf.get("norm_topk_prob", True) is not wanted:
        raise ConfigError(
            f"norm_topk_prob must be {wanted}, found {hf['norm_topk_prob']!r}: megatron-core normalises the sigmoid "
            "scores of several experts, and never that of one."
        )
    return {}


def _normalised_back(mcore: Mcore) -> dict[str, object]:
    topk = mcore["moe_router_topk"]
    assert isinstance(topk, int)
    return {"norm_topk_prob": topk > 1}


def _groups(hf: Hf, *, best: int) -> dict[str, object]:
    """``best`` experts stand for a group in HF; in megatron-core as many as each chosen group contributes."""
    groups, chosen = hf.get("n_group") or 1, hf.get("topk_group") or 1
    assert isinstance(groups, int)
    assert isinstance(chosen, int)
    if groups == 1 and chosen == 1:
        return {"moe_router_num_groups": None, "moe_router_group_topk": None}
    if count(hf, "num_experts_per_tok") // chosen != best:
        raise ConfigError(
            f"num_experts_per_tok // topk_group must be {best}, found {hf['num_experts_per_tok']} // {chosen}: HF "
            f"ranks groups of experts by their best {best}, megatron-core by as many as that quotient."
        )
    return {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}


def _groups_back(mcore: Mcore) -> dict[str, object]:
    return {"n_group": mcore["moe_router_num_groups"] or 1, "topk_group": mcore["moe_router_group_topk"] or 1}


def _sigmoid_groups(hf: Hf) -> dict[str, object]:
    return _groups(hf, best=2)


def _method(hf: Hf) -> dict[str, object]:
    method = hf.get("topk_method")
    if method == "greedy":
        return _groups({}, best=1)
    if method != "group_limited_greedy":
        raise ConfigError(f"topk_method must be 'greedy' or 'group_limited_greedy', found {method!r}.")
    return _groups(hf, best=1)


def _method_back(mcore: Mcore) -> dict[str, object]:
    if mcore["moe_router_num_groups"] is None:
        return {"topk_method": "greedy", "n_group": None, "topk_group": None}
    return {"topk_method": "group_limited_greedy", **_groups_back(mcore)}


# fmt: off
LEADING_DENSE = Derive(("first_k_dense_replace",), _leading_dense, _leading_dense_back)
LISTED_SPARSE = Derive(("mlp_layer_types", "first_k_dense_replace"), _listed, _listed_back)
SHARED        = Derive(("moe_intermediate_size", "n_shared_experts"), _shared, _shared_back)
NORMALISED    = Derive(("norm_topk_prob",), _normalised, _normalised_back)
GROUPS        = Derive(("n_group", "topk_group"), _sigmoid_groups, _groups_back)
METHOD        = Derive(("topk_method", "n_group", "topk_group"), _method, _method_back)
# fmt: on

COUNTED: tuple[Field, ...] = (
    *ROUTED,
    SHARED,
    Map("n_routed_experts", "num_moe_experts"),
    Map("routed_scaling_factor", "moe_router_topk_scaling_factor"),
    Const("moe_shared_expert_gate", False),
    Preset("moe_router_dtype", "fp32"),
    Require("moe_layer_freq", (1, None), "after the dense layers, every layer has experts"),
    Ignore("it is the number of processes that a trainer wanted", ("ep_size",)),
    Ignore("layers for multi-token prediction are not built", ("num_nextn_predict_layers", "num_mtp_layers")),
)
"""Routed and shared experts of one size. Which layers have them, and how the router scores, is another table's."""
SIGMOID: tuple[Field, ...] = (
    *(NORMALISED, GROUPS),
    Const("moe_router_score_function", "sigmoid"),
    Const("moe_router_enable_expert_bias", True),
    Preset("moe_router_bias_update_rate", 0.0),  # the trainer's, as the auxiliary loss is
    Require("scoring_func", ("sigmoid", None), "transformers computes this one for any"),
    Require("topk_method", ("noaux_tc", None), "transformers computes this one for any"),
)
"""The router's scores are sigmoids; a bias joins them where experts are chosen, in groups perhaps."""
GREEDY: tuple[Field, ...] = (
    METHOD,
    Const("moe_router_score_function", "softmax"),
    Const("moe_router_enable_expert_bias", False),
    Const("moe_router_pre_softmax", True),
    Require("norm_topk_prob", (False,), "transformers would not normalise, whatever it says"),
    Require("scoring_func", ("softmax", None), "transformers computes this one for any"),
)
"""The router's scores are a softmax over all experts, as they are."""
