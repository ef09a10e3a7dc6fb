"""Planted mistakes in models whose softmax scores have a bias, or whose q, k and v are one tensor."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mcore_bridge.factory.modules import experts
from mcore_bridge.factory.modules.experts import BiasedRouter
from mcore_bridge.rules.layout import COLUMN, GROUPS, REPLICATED, Concat, Split
from tests.support.bounds import ONE
from tests.support.mutants import exchange, instead, laid_out, of
from tests.support.strategies import tiny

NAME = "ernie4_5_moe"


def router(change: Callable[..., tuple[Tensor, Tensor]]) -> Any:
    """A router with another choice, by a function of the router, the scores, and mcore's choice."""

    def chosen(self: Any, ask: Any, scores: Tensor, topk: int, groups: Any, group_topk: Any, compute: Any) -> Any:
        return change(self, scores, lambda by: ask(by, topk, groups, group_topk, compute)[1])

    return NAME, ONE, instead(BiasedRouter, "_chosen", chosen)


def weighed(weights: Tensor, least: float) -> Tensor:
    return weights / weights.sum(-1, keepdim=True).clamp(min=least)


def bias_in_weights(self: Any, scores: Tensor, best: Any) -> tuple[Tensor, Tensor]:
    biased = scores + self.expert_bias
    return weighed(biased.gather(1, found := best(biased)), self.config.router_norm_min), found


def no_bias(self: Any, scores: Tensor, best: Any) -> tuple[Tensor, Tensor]:
    return weighed(scores.gather(1, found := best(scores)), self.config.router_norm_min), found


def not_normalised(self: Any, scores: Tensor, best: Any) -> tuple[Tensor, Tensor]:
    return scores.gather(1, found := best(scores + self.expert_bias)), found


def not_clamped(self: Any, scores: Tensor, best: Any) -> tuple[Tensor, Tensor]:
    return weighed(scores.gather(1, found := best(scores + self.expert_bias)), 0.0), found


def as_it_is(self: Any, scores: Tensor, best: Any) -> tuple[Tensor, Tensor]:
    found = best(scores + self.expert_bias)
    return weighed(scores.gather(1, found), self.config.router_norm_min), found


MODULES = {
    "bias in the weights": router(bias_in_weights),
    "bias left out": router(no_bias),
    "weights not normalised": router(not_normalised),
    "weights not clamped": router(not_clamped),
    "mcore's own choice": (NAME, ONE, instead(experts, "has_softmax_bias", lambda *arguments: False)),
    "no mistake, in this way": router(as_it_is),
}


HF = tiny(NAME, num_hidden_layers=2, moe_num_experts=4, moe_k=2, moe_intermediate_size=32)
RULES = {
    "bias not of one row": ("shapes", HF, of("expert_bias", laid_out(REPLICATED))),
    "bias of one row cut": ("shapes", HF, of("expert_bias", laid_out(COLUMN))),
    "bias forgotten": ("no rule", HF, of("expert_bias", lambda rule: None)),
}


BY_GROUP = GROUPS >> Split(1, ("heads_per_group", 1, 1)) >> Concat(1, ("heads_per_group", 1, 1)) >> ~GROUPS >> COLUMN
FUSED = {
    "q, k and v by groups, as mcore has them": of("linear_qkv.weight", laid_out(BY_GROUP)),
    "norms of q and k exchanged": exchange("q_layernorm.weight", "k_layernorm.weight"),
}
"""Mistakes in the fused projection of Ling, for which an equivalent family is used."""
