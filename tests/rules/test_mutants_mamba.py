"""Planted mistakes in the rules of Mamba-2 mixers, in their layouts, and in the modules of layers of one half."""

import contextlib
from dataclasses import dataclass
from unittest import mock

import pytest
import torch

from mcore_bridge.factory.modules import mamba_kernels
from mcore_bridge.factory.modules import mamba_mixer as mamba
from mcore_bridge.rules.layout import COLUMN, REPLICATED, Concat, Layout, Split
from tests import zoo
from tests.support import mutants, pool
from tests.support.bounds import BOUND, TWO
from tests.support.mutants import DEALT_ROW, exchange, laid_out, of
from tests.support.parity import reference_logits, worst_differences

HF = zoo.cases()["nemotron_h"].hf if "nemotron_h" in zoo.cases() else None
pytestmark = pytest.mark.skipif(HF is None, reason="the installed transformers has no family with mixers")
IN = ("mamba_inner", "mamba_inner", "mamba_state", "mamba_state", "mamba_heads")
CONV = ("mamba_inner", "mamba_state", "mamba_state")
STEPS_BEFORE_C = (*IN[:3], "mamba_heads", "mamba_state")


@dataclass(frozen=True)
class Order(Layout):
    """The parts in another order, which is its own inverse."""

    order: tuple[int, ...]

    def __call__(self, parts, axes):
        return tuple(parts[index] for index in self.order)

    def __invert__(self):
        return self


def ordered(ratio, *order):
    return laid_out(Split(0, ratio) >> Order(order) >> COLUMN >> Concat(1, ratio))


STEPS_FIRST = Split(0, STEPS_BEFORE_C) >> COLUMN >> Concat(1, STEPS_BEFORE_C)
# fmt: off
RULES = {
    "in_proj cut whole":       ("logits at tp=2", of("in_proj.weight", laid_out(COLUMN))),
    "z and x exchanged":       ("logits",         of("in_proj.weight", ordered(IN, 1, 0, 2, 3, 4))),
    "B and C exchanged":       ("logits",         of("in_proj.weight", ordered(IN, 0, 1, 3, 2, 4))),
    "time steps before C":     ("logits at tp=2", of("in_proj.weight", laid_out(STEPS_FIRST))),
    "B and C in conv1d":       ("logits",         of("conv1d.weight", ordered(CONV, 0, 2, 1))),
    "B and C in its bias":     ("logits",         of("conv1d.bias", ordered(CONV, 0, 2, 1))),
    "conv1d cut whole":        ("logits at tp=2", of("conv1d.weight", laid_out(COLUMN))),
    "its bias cut whole":      ("logits at tp=2", of("conv1d.bias", laid_out(COLUMN))),
    "decay for time step":     ("logits",         exchange("A_log", "dt_bias")),
    "skip for decay":          ("logits",         exchange("A_log", "self_attention.D")),
    "skip for time step":      ("logits",         exchange("dt_bias", "self_attention.D")),
    "out_proj dealt out":      ("logits at tp=2", of("out_proj.weight", laid_out(DEALT_ROW))),
    "skip replicated":         ("shapes at tp=2", of("self_attention.D", laid_out(REPLICATED))),
    "decay replicated":        ("shapes at tp=2", of("A_log", laid_out(REPLICATED))),
    "time step replicated":    ("shapes at tp=2", of("dt_bias", laid_out(REPLICATED))),
    "norm replicated":         ("shapes at tp=2", of("self_attention.norm.weight", laid_out(REPLICATED))),
}
# fmt: on


def fates(tp, names, reference):
    with mock.patch.dict(mutants.MUTANTS, {**RULES, "none": ("", lambda rules: rules)}):
        return [mutants.fate(name, HF, tp, reference) for name in names]


@pytest.fixture(scope="module")
def found():
    reference, names = reference_logits(HF), [*RULES, "none"]
    return {tp: dict(zip(names, pool.run(tp, fates, tp, names, reference)[0], strict=True)) for tp in (1, 2)}


@pytest.mark.parametrize("name", RULES)
def test_killed_rule(found, name):
    tier, _, tp = RULES[name][0].partition(" at tp=")
    fate = found[2][name]
    assert fate == "logits" if tier == "logits" else fate not in ("survives", "logits"), fate
    if tp:
        assert found[1][name] == "survives"


def test_the_true_rules_survive(found):
    assert {at["none"] for at in found.values()} == {"survives"}


_norm, _ahead, _scan = mamba.GroupNorm.forward, mamba_kernels._ahead, mamba_kernels.scan


def ungrouped(self, hidden, gate):
    with mock.patch.object(self.groups, "count", 1):
        return _norm(self, hidden, gate)


MISTAKES = {
    "one norm of all groups": lambda: mock.patch.object(mamba.GroupNorm, "forward", ungrouped),
    "no gate": lambda: mock.patch.object(
        mamba.GroupNorm, "forward", lambda self, hidden, gate: _norm(self, hidden, torch.ones_like(gate))
    ),
    "a token sees the next": lambda: mock.patch.object(mamba_kernels, "_ahead", lambda since: _ahead(since).triu(2)),
    "B for C": lambda: mock.patch.object(
        mamba_kernels, "scan", lambda x, steps, decay, into, out_of, skip: _scan(x, steps, decay, out_of, into, skip)
    ),
    "no skip": lambda: mock.patch.object(
        mamba_kernels, "scan", lambda *parts: _scan(*parts[:5], torch.zeros_like(parts[5]))
    ),
    "none": contextlib.nullcontext,
}


_whole = mamba.Groups.whole


def alone(norm):
    """Ranks of one group that do not tell each other their mean squares, or else their rows of B and C."""

    def whole(self, part):
        is_norm = part.size(-1) == self.count
        return part.unsqueeze(-2).repeat_interleave(self.sharers, -2) if is_norm == norm else _whole(self, part)

    return lambda: mock.patch.object(mamba.Groups, "whole", whole)


SHARED = {"norms of a part": alone(norm=True), "B and C of a part": alone(norm=False)}
"""Mistakes of ranks that share a group."""


def mistaken(hf, names, reference, dims):
    differences = {}
    for name in names:
        with {**MISTAKES, **SHARED}[name]():
            (differences[name],) = worst_differences([(hf, dims, reference)])
    return differences


@pytest.mark.parametrize(("case", "names"), [("nemotron_h", MISTAKES), ("granitemoehybrid", [*SHARED, "none"])])
def test_killed_modules(case, names):
    hf = zoo.cases()[case].hf
    differences = pool.run(2, mistaken, hf, list(names), reference_logits(hf), TWO)[0]
    assert differences.pop("none") < BOUND
    assert all(difference > 50 * BOUND for difference in differences.values()), differences
