"""Planted mistakes in experts: in their rules, in the order of gate and up, in sinks, in the router."""

import contextlib
import re
from dataclasses import replace
from unittest import mock

import pytest
import torch

import mcore_bridge as mb
from mcore_bridge.errors import BridgeError
from mcore_bridge.factory.modules.experts import Router
from mcore_bridge.factory.modules.scores import ScoresCoreAttention
from mcore_bridge.rules.layout import COLUMN, GATED_UP, INTERLEAVED, REPLICATED, ROW, TRANSPOSED, Split
from mcore_bridge.weights import model_tensors
from tests import zoo
from tests.support import mutants, pool, stepping
from tests.support.bounds import BOUND, ONE
from tests.support.mutants import exchange, laid_out, of, parts
from tests.support.parity import reference_logits, reference_of, worst_differences
from tests.support.strategies import random_state, tiny

SHARED = tiny(
    "qwen2_moe",
    hidden_size=64,
    head_dim=8,
    num_hidden_layers=2,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    shared_expert_intermediate_size=64,
)
SINKS = tiny(
    "gpt_oss",
    hidden_size=64,
    intermediate_size=64,
    head_dim=8,
    num_key_value_heads=8,
    num_hidden_layers=2,
    num_local_experts=4,
    num_experts_per_tok=2,
    sliding_window=6,
)


FC1, FC2 = "experts.*.linear_fc1.weight", "experts.*.linear_fc2.weight"
HALVES = Split(0, (1, 1)) >> GATED_UP
# fmt: off
RULES = {
    # name                          killed by, model           mutation of the rules
    "up before gate":               ("logits",         SHARED, of("experts.*.linear_fc1.weight", parts(1, 0))),
    "gate for up of the shared":    ("logits",         SHARED, of("shared_experts.linear_fc1.weight", parts(1, 0))),
    "shared for routed down":       ("numbers",          SHARED, exchange("experts.*.linear_fc2.weight",
                                                                        "shared_experts.linear_fc2.weight")),
    "shared gate cut":              ("shapes at tp=2", SHARED, of("gate_weight", laid_out(COLUMN))),
    "expert cut by tp":             ("shapes at tp=2", SHARED, of("experts.*.linear_fc2.weight",
                                                                  lambda rule: replace(rule, axis="tp"))),
    "router forgotten":             ("no rule",        SHARED, of("router.weight", lambda rule: None)),
    "halves, not every other row":  ("logits",         SINKS,  of(FC1, laid_out(TRANSPOSED >> HALVES))),
    "bias in halves":               ("logits",         SINKS,  of("experts.*.linear_fc1.bias", laid_out(HALVES))),
    "down not transposed":          ("logits",         SINKS,  of(FC2, laid_out(ROW))),
    "gate_up not transposed":       ("shapes",         SINKS,  of(FC1, laid_out(INTERLEAVED))),
    "sinks replicated":             ("shapes at tp=2", SINKS,  of("softmax_offset", laid_out(REPLICATED))),
}
# fmt: on


ERRORS = {**mutants.ERRORS, "numbers": "as many numbers"}


def fates(tp, chosen, references):
    found = {}
    for name in chosen:
        tier, hf, mutate = RULES[name]
        with mock.patch.dict(mutants.MUTANTS, {name: (tier, mutate)}):
            found[name] = mutants.fate(name, hf, tp, references[hf.model_type])
    return found


@pytest.fixture(scope="module")
def found():
    references = {hf.model_type: reference_logits(hf) for hf in (SHARED, SINKS)}
    return {tp: pool.run(tp, fates, tp, list(RULES), references)[0] for tp in (1, 2)}


@pytest.mark.parametrize("name", RULES)
def test_killed_rule(found, name):
    tier, _, tp = RULES[name][0].partition(" at tp=")
    fate = found[2][name]
    assert fate == "logits" if tier == "logits" else re.search(ERRORS[tier], fate), fate
    if tp:
        assert found[1][name] == "survives"


def without_sinks(self, scores):
    return scores.softmax(-1)


def without_bias(self, input):
    self.expert_bias.zero_()
    return TRUE_GATING(self, input)


TRUE_GATING = Router.gating
MISTAKES = {
    "sinks left out": ("gpt_oss", lambda: mock.patch.object(ScoresCoreAttention, "_softmax", without_sinks)),
    "router bias left out": ("glm4_moe", lambda: mock.patch.object(Router, "gating", without_bias)),
    "none": ("gpt_oss", contextlib.nullcontext),
}


def mistaken(cases):
    found = {}
    for name, (hf, reference) in cases.items():
        with MISTAKES[name][1]():
            (found[name],) = worst_differences([(hf, ONE, reference)])
    return found


def test_killed_modules():
    cases = {name: (zoo.cases()[case].hf, reference_of(case)) for name, (case, _) in MISTAKES.items()}
    (found,) = pool.run(1, mistaken, cases)
    assert found.pop("none") < BOUND
    assert all(worst > 50 * BOUND for worst in found.values()), found


def test_killed_local_expert_numbers():
    """The load cannot detect it, since every rank finds all tensors that it reads; the export misses experts."""
    for message in pool.run(2, exported_with_local_numbers, random_state(SHARED)):
        assert "no rank of the group holds the experts [2, 3]" in message


def exported_with_local_numbers(state):
    """Runs in each worker."""
    true = model_tensors.canonical
    dims = mb.ParallelDims(ep=2)

    def mistaken(name, numbering):
        return true(name, replace(numbering, experts=tuple(range(len(numbering.experts)))))

    with mock.patch.object(model_tensors, "canonical", mistaken), stepping.mesh(dims):
        try:
            models = mb.build_model(SHARED, dims=dims, dtype=torch.float32, device="cpu", load_weights=state)
            mb.to_hf_state_dict(models)
        except BridgeError as error:
            return str(error)
    return "survives"
