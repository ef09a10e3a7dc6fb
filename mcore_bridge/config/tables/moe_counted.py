"""Config tables of experts as in DeepSeek: shared experts in sizes of a routed one, and routing by groups in some
models.
"""

from mcore_bridge.config.fields import Const, Derive, Field, Hf, Map, Mcore, Preset, Require, count
from mcore_bridge.config.tables import but, unread
from mcore_bridge.config.tables.derived import called
from mcore_bridge.config.tables.moe import (
    GROUPS,
    IF_SEVERAL,
    MTP_ON_REQUEST,
    ROUTED,
    SCALED,
    SIGMOID,
    SOFTMAX,
    groups_back,
    shared_experts,
)
from mcore_bridge.errors import ConfigError


def _method(hf: Hf) -> dict[str, object]:
    """DeepSeek V2: the best of all experts, or of the best groups. A group is ranked by its best expert."""
    method, chosen = hf.get("topk_method"), count(hf, "topk_group", unset=1)
    if method == "greedy" or (method == "group_limited_greedy" and hf.get("n_group") == chosen):
        return {"moe_router_num_groups": None, "moe_router_group_topk": None}
    if method != "group_limited_greedy":
        raise ConfigError(f"topk_method must be 'greedy' or 'group_limited_greedy', found {method!r}.")
    if (topk := count(hf, "num_experts_per_tok")) // chosen != 1:
        raise ConfigError(
            f"num_experts_per_tok={topk} must be less than twice topk_group={chosen} with group_limited_greedy: HF "
            "ranks a group by its best expert, megatron-core (moe_utils.py, group_limited_topk) by as many as it takes."
        )
    return {"moe_router_num_groups": count(hf, "n_group"), "moe_router_group_topk": chosen}


def _method_back(mcore: Mcore) -> dict[str, object]:
    if mcore["moe_router_num_groups"] is None:
        return {"topk_method": "greedy", "n_group": None, "topk_group": None}
    return {"topk_method": "group_limited_greedy", **groups_back(mcore)}


def given(entry: Derive, *names: str) -> Derive:
    """``entry`` for families without a config class in transformers: these fields have no default, and must be set.

    Without ``names`` all of its fields must be set.
    """

    def forward(hf: Hf) -> dict[str, object]:
        for name in names or entry.names:
            if hf.get(name) is None:
                count(hf, name)
        return entry.forward(hf)

    return Derive(entry.names, forward, entry.backward, entry.refuses)


GIVEN_GROUPS = given(GROUPS)
_REFUSED = (
    "`topk_method` other than `greedy` and `group_limited_greedy`: transformers computes no other",
    "`group_limited_greedy` unless `num_experts_per_tok` is below twice `topk_group`: HF ranks a group by its best "
    "expert, megatron-core by as many as it takes from each (moe_utils.py, group_limited_topk)",
)
METHOD = Derive(("topk_method", "n_group", "topk_group"), _method, _method_back, _REFUSED)

COUNTED: tuple[Field, ...] = (
    *but(ROUTED, Map("n_routed_experts", "num_moe_experts")),
    shared_experts("n_shared_experts"),
    Const("moe_shared_expert_gate", False),
    *(SCALED, MTP_ON_REQUEST, unread("ep_size")),
)
"""Routed and shared experts of one size. Other tables have the layers with experts, and the router's scores."""
SIGMOID_GROUPED: tuple[Field, ...] = (
    *(*SIGMOID, GROUPS),
    Require("scoring_func", ("sigmoid", None), "transformers computes this one for any"),
    Require("topk_method", ("noaux_tc", None), "transformers computes this one for any"),
)
"""``SIGMOID``, with experts chosen from the best groups."""
NAMED_BY_KIMI: tuple[Field, ...] = (
    *but(
        (*COUNTED, *SIGMOID_GROUPED),
        Map("num_experts", "num_moe_experts"),
        Map("num_experts_per_token", "moe_router_topk"),
        shared_experts("num_shared_experts"),
        called(GROUPS, n_group="num_expert_group", num_experts_per_tok="num_experts_per_token"),
        called(IF_SEVERAL, norm_topk_prob="moe_renormalize", num_experts_per_tok="num_experts_per_token"),
    ),
)
"""``COUNTED`` and ``SIGMOID_GROUPED`` by the names of Kimi Linear."""
GREEDY: tuple[Field, ...] = (
    *(*SOFTMAX, METHOD),
    Const("moe_router_pre_softmax", True),
    Preset("moe_router_dtype", "fp32"),
    Require("norm_topk_prob", (False,), "transformers would never normalise"),
    Require("scoring_func", ("softmax", None), "transformers computes this one for any"),
)
"""The router's scores are a softmax over all experts in fp32, and not normalised."""
