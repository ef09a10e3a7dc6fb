"""Planted mistakes where softmax scores have a bias, and where q, k and v are one tensor."""

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from mcore_bridge.factory.modules import experts
from mcore_bridge.factory.modules.experts import BiasedRouter
from mcore_bridge.rules.layout import COLUMN, GROUPS, REPLICATED, Concat, Split
from tests import zoo
from tests.support import bailing, bailing_logits, mutants, pool
from tests.support.bounds import BOUND, ONE
from tests.support.mutants import fate, laid_out, of
from tests.support.parity import reference_logits, reference_of, worst_differences
from tests.support.strategies import tiny

NAME = "ernie4_5_moe"


def router(change: Callable[..., tuple[Tensor, Tensor]]) -> Any:
    """The router with another choice: a function of itself, the scores, what mcore would choose by scores."""

    def chosen(self: Any, ask: Any, scores: Tensor, topk: int, groups: Any, group_topk: Any, compute: Any) -> Any:
        return change(self, scores, lambda by: ask(by, topk, groups, group_topk, compute)[1])

    return mock.patch.object(BiasedRouter, "_chosen", chosen)


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


MISTAKES: dict[str, Callable[[], Any]] = {
    "bias in the weights": lambda: router(bias_in_weights),
    "bias left out": lambda: router(no_bias),
    "weights not normalised": lambda: router(not_normalised),
    "weights not clamped": lambda: router(not_clamped),
    "mcore's own choice": lambda: mock.patch.object(experts, "has_softmax_bias", return_value=False),
    "none": lambda: router(as_it_is),
    "none at all": contextlib.nullcontext,
}


def mistaken(hf: Any, reference: Tensor) -> dict[str, float]:
    """Runs in a worker."""
    found = {}
    for name, mistake in MISTAKES.items():
        with mistake():
            (found[name],) = worst_differences([(hf, ONE, reference)])
    return found


def test_killed_routers() -> None:
    (found,) = pool.run(1, mistaken, zoo.cases()[NAME].hf, reference_of(NAME))
    assert found.pop("none") < BOUND
    assert found.pop("none at all") < BOUND
    assert all(worst > 50 * BOUND for worst in found.values()), found


HF = tiny(NAME, num_hidden_layers=2, moe_num_experts=4, moe_k=2, moe_intermediate_size=32)
RULES = {
    "bias not of one row": ("shapes", of("expert_bias", laid_out(REPLICATED))),
    "bias of one row cut": ("shapes", of("expert_bias", laid_out(COLUMN))),
    "bias forgotten": ("no rule", of("expert_bias", lambda rule: None)),
    "none": ("survives", lambda rules: rules),
}


def fates(reference: Tensor) -> dict[str, str]:
    """Runs in each worker."""
    found = {}
    for name, rule in RULES.items():
        with mock.patch.dict(mutants.MUTANTS, {name: rule}):
            found[name] = fate(name, HF, 2, reference)
    return found


def test_killed_rules() -> None:
    errors = {**mutants.ERRORS, "survives": "survives"}
    for found in pool.run(2, fates, reference_logits(HF)):
        for name, (tier, _) in RULES.items():
            assert re.search(errors[tier], found[name]), f"{name}: {found[name]}"


BY_GROUP = GROUPS >> Split(1, ("heads_per_group", 1, 1)) >> Concat(1, ("heads_per_group", 1, 1)) >> ~GROUPS >> COLUMN
FUSED = {
    "q, k and v by groups, as mcore has them": of("linear_qkv.weight", laid_out(BY_GROUP)),
    "norms of q and k exchanged": mutants.exchange("q_layernorm.weight", "k_layernorm.weight"),
}


def fused_mistaken(folder: str, name: str) -> Tensor:
    """Runs in a worker."""
    with mock.patch.dict(mutants.MUTANTS, {name: ("logits", FUSED[name])}), mutants.mutated(name):
        return bailing_logits.logits(folder, ONE)


@pytest.mark.parametrize("name", FUSED)
def test_killed_fused(tmp_path: Path, name: str) -> None:
    (tmp_path / "ling").mkdir()
    (tmp_path / "twin").mkdir()
    fields = bailing.TINY["grouped"]
    folder = bailing.write(tmp_path / "ling", fields, bailing.twin_state(fields))
    reference = bailing_logits.reference(fields, tmp_path / "twin")
    (ours,) = pool.run(1, fused_mistaken, str(folder), name)
    assert float((ours - reference).abs().max() / reference.std()) > 50 * BOUND
