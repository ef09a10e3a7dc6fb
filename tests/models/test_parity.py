"""The mapping is right: logits equal transformers' in fp32 at tp 1, tp 2, and tp above the number of KV groups.

The bound is 2e-5 of the logits' spread; two exact implementations of these models differ by about 2e-6 in fp32, and the
smallest planted mistake of ``test_mutants.py`` moves them by more than 1e-3.
"""

import pytest

from tests import zoo
from tests.support import pool
from tests.support.bounds import BOUND, EXPERT_MESHES, FOUR, ONE, TWO
from tests.support.parity import reference_of, worst_differences
from tests.support.shared_jobs import results
from tests.support.strategies import tiny
from tests.zoo import rope


def case_of(name, dims):
    return ([(zoo.cases()[name].hf, dims, reference_of(name))],)


@pytest.mark.parametrize("dims", [ONE, TWO, FOUR], ids=str)
@pytest.mark.parametrize("name", zoo.params(zoo.written()))
def test_logits_are_those_of_transformers(name, dims):
    """At tp=4 nearly every case has fewer KV groups than ranks."""
    for (worst,) in results(worst_differences, case_of, dims, name, [*zoo.cases()]):
        assert worst < BOUND


@pytest.mark.parametrize("dims", EXPERT_MESHES, ids=str)
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe", "mixtral", "llama4"])
def test_logits_do_not_depend_on_where_experts_are(name, dims):
    for (worst,) in pool.run(dims.smallest_world, worst_differences, *case_of(name, dims)):
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
