"""The mapping is right: logits equal transformers' in fp32 at tp 1, tp 2, and tp above the number of KV groups.

The bound is 2e-5 of the logits' spread; two exact implementations of these models differ by about 2e-6 in fp32, and the
smallest planted mistake of ``test_mutants.py`` moves them by more than 1e-3.
"""

import os
from functools import cache

import pytest

from tests import zoo
from tests.support import pool
from tests.support.bounds import BOUND, EXPERT_MESHES, FOUR, ONE, TWO
from tests.support.parity import reference_of, worst_differences
from tests.support.strategies import tiny
from tests.zoo import rope

TOGETHER = 20 if "PYTEST_XDIST_WORKER" in os.environ else 1
"""The number of cases in one job of the pool. Making the groups of a mesh takes longer than a case."""


@cache
def differences(dims, names):
    """The results of all ranks, by name. They are empty if one of several cases raised; each case then runs alone."""
    cases = [(zoo.cases()[name].hf, dims, reference_of(name)) for name in names]
    try:
        ranks = pool.run(dims.tp, worst_differences, cases)
    except Exception:
        if len(names) == 1:
            raise
        return {}
    return dict(zip(names, zip(*ranks, strict=True), strict=True))


@pytest.mark.parametrize("dims", [ONE, TWO, FOUR], ids=str)
@pytest.mark.parametrize("name", zoo.params(zoo.written()))
def test_logits_are_those_of_transformers(name, dims):
    """At tp=4 nearly every case has fewer KV groups than ranks."""
    names = [*zoo.cases()]
    first = names.index(name) // TOGETHER * TOGETHER
    together = differences(dims, tuple(names[first : first + TOGETHER]))
    for worst in together.get(name) or differences(dims, (name,))[name]:
        assert worst < BOUND


@pytest.mark.parametrize("dims", EXPERT_MESHES, ids=str)
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe", "mixtral", "llama4"])
def test_logits_do_not_depend_on_where_experts_are(name, dims):
    case = (zoo.cases()[name].hf, dims, reference_of(name))
    for (worst,) in pool.run(max(dims.tp, dims.ep * dims.etp), worst_differences, [case]):
        assert worst < BOUND


def test_parity_can_fail():
    """Negative controls: another rope base, another epsilon, a window off by one, a window forgotten."""
    groups = {"num_key_value_heads": 2}
    wrong = {
        "rope base": (tiny("llama", **groups, vocab_size=97, **rope("default", theta=20000.0)), "llama"),
        "epsilon": (tiny("llama", **groups, vocab_size=97, rms_norm_eps=1e-2), "llama"),
        "window off by one": (tiny("mistral", **groups, sliding_window=6), "mistral-window"),
        "no window": (tiny("mistral", **groups, sliding_window=None), "mistral-window"),
    }
    cases = [(hf, ONE, reference_of(name)) for hf, name in wrong.values()]
    (worst,) = pool.run(1, worst_differences, cases)
    assert all(difference > 50 * BOUND for difference in worst), dict(zip(wrong, worst, strict=True))
