"""Planted mistakes in sparse attention: in the indexer's rules, the selection, and the sharing between layers."""

import contextlib
from unittest import mock

import pytest

from mcore_bridge.factory.modules.latent_modules import LatentNorm
from mcore_bridge.rules.layout import COLUMN
from tests import zoo
from tests.support import mutants, pool
from tests.support.bounds import BOUND, ONE
from tests.support.latent_mistakes import with_epsilon_of_mcore
from tests.support.mutants import exchange, laid_out, of
from tests.support.parity import reference_logits, reference_of, worst_differences

CASE, SHARED = "deepseek_v32", "glm_moe_dsa-shared"
pytestmark = pytest.mark.skipif(CASE not in zoo.cases(), reason="needs newer transformers and megatron-core")
# fmt: off
RULES = {
    "weight for bias":       ("logits",         exchange("k_norm.weight", "k_norm.bias")),
    "queries cut":           ("shapes at tp=2", of("linear_wq_b.weight", laid_out(COLUMN))),
    "indexer rule forgotten": ("no rule",       of("linear_wk.weight", lambda rule: None)),
}
# fmt: on
FATES = {"logits": "logits", "shapes": "shape", "no rule": "no rule"}


def fates(tp, name, names, reference):
    hf = zoo.cases()[name].hf
    with mock.patch.dict(mutants.MUTANTS, {**RULES, "none": ("", lambda rules: rules)}):
        return [mutants.fate(name, hf, tp, reference, sp=tp > 1) for name in names]


@pytest.fixture(scope="module")
def found():
    names, reference = [*RULES, "none"], reference_logits(zoo.cases()[CASE].hf)
    return {tp: dict(zip(names, pool.run(tp, fates, tp, CASE, names, reference)[0], strict=True)) for tp in (1, 2)}


@pytest.mark.parametrize("name", RULES)
def test_killed_rule(found, name):
    tier, _, tp = RULES[name][0].partition(" at tp=")
    assert FATES[tier] in found[2][name]
    if tp:
        assert found[1][name] == "survives"


def test_the_true_rules_survive(found):
    assert {at["none"] for at in found.values()} == {"survives"}


def dsa():
    from megatron.core.transformer.experimental_attention_variant import dsa

    return dsa


def sees_all(select):
    return lambda q, k, weights, topk, *rest, **keywords: select(q, k, weights, k.size(0), *rest, **keywords)


def one_less(select):
    return lambda q, k, weights, topk, *rest, **keywords: select(q, k, weights, topk - 1, *rest, **keywords)


def without_relu(select):
    return lambda *rest, **keywords: select(*rest, **{**keywords, "use_relu": False})


def rotated_otherwise(rotate):
    def rotated(self, *arguments, **keywords):
        other = not self.config.dsa_indexer_rope_interleaved
        with mock.patch.object(self.config, "dsa_indexer_rope_interleaved", other):
            return rotate(self, *arguments, **keywords)

    return rotated


def selecting(change):
    return mock.patch.object(dsa(), "fused_qk_topk_naive", change(dsa().fused_qk_topk_naive))


def rotating(change):
    return mock.patch.object(dsa().DSAIndexer, "_apply_rope", change(dsa().DSAIndexer._apply_rope))


MISTAKES = {
    "none": (CASE, contextlib.nullcontext),
    "none, shared": (SHARED, contextlib.nullcontext),
    "indexer forgotten": (CASE, lambda: selecting(sees_all)),
    "one token less": (CASE, lambda: selecting(one_less)),
    "negative scores count": (CASE, lambda: selecting(without_relu)),
    "indexer not rotated": (CASE, lambda: rotating(lambda rotate: lambda self, heads, *rest, **keywords: heads)),
    "neighbours rotated": (CASE, lambda: rotating(rotated_otherwise)),
    "halves rotated": (SHARED, lambda: rotating(rotated_otherwise)),
    "selection of the first layer": (
        SHARED,
        lambda: mock.patch.object(dsa(), "source_dsa_compute_layer", return_value=1),
    ),
    "epsilon of latents": (CASE, lambda: mock.patch.object(LatentNorm, "__init__", with_epsilon_of_mcore)),
}


def mistaken(references):
    """Run in the worker: the largest difference of logits for each mistake."""
    found = {}
    for name, (case, mistake) in MISTAKES.items():
        with mistake():
            (found[name],) = worst_differences([(zoo.cases()[case].hf, ONE, references[case])])
    return found


def test_killed_modules():
    (found,) = pool.run(1, mistaken, {case: reference_of(case) for case in (CASE, SHARED)})
    assert found.pop("none") < BOUND
    assert found.pop("none, shared") < BOUND
    assert all(difference > 50 * BOUND for difference in found.values()), found
