"""Planted mistakes in linear attention and gated full attention: in rules, layouts, and code that affects gradients."""

import contextlib
import tempfile
from unittest import mock

import megatron.core
import pytest
import torch

from mcore_bridge import ParallelDims
from mcore_bridge.factory.modules import delta as modules
from mcore_bridge.rules.layout import COLUMN, GROUPS, REPLICATED, Concat, Leading, Split
from mcore_bridge.rules.layout_delta import DELTA, DELTA_CONV, DELTA_HEAD, KEY_HEADS, Q_AND_GATE
from tests.support import mutants, pool, stepping, tiny
from tests.support.bounds import BOUND, FOUR
from tests.support.mutants import DEALT_ROW, exchange, laid_out, of
from tests.support.parity import reference_logits, reference_model, worst_differences
from tests.zoo.delta import EXPERTS, SQUARE, delta

HF = delta(
    "qwen3_next",
    **{**EXPERTS, **SQUARE, "vocab_size": 90, "layer_types": ["linear_attention", "full_attention"]},
    num_hidden_layers=2,
    mlp_only_layers=[0, 1],
).hf
RATIO = ("heads_per_group", "heads_per_group", 1, 1)
SECTIONS = ("key", "key", "value", "value", "value_heads", "value_heads")


def gated(*steps):
    layout = Q_AND_GATE
    for step in steps:
        layout = layout >> step
    return layout


IN_HALVES = Leading(1, 2, Split(0, (1, 1))) >> GROUPS >> Concat(1, RATIO) >> ~GROUPS >> COLUMN
FLAT = Concat(0, ("qkvz", "ba")) >> Split(0, SECTIONS) >> COLUMN >> Concat(1, SECTIONS)
UNCUT = KEY_HEADS >> Concat(1, ("qkvz", "ba")) >> Split(1, SECTIONS) >> ~KEY_HEADS >> Concat(0, SECTIONS) >> COLUMN
BY_HEAD = KEY_HEADS >> Concat(1, ("qkvz", "ba")) >> ~KEY_HEADS >> COLUMN
OUT, IN, CONV, QKV = "out_proj.weight", "in_proj.weight", "conv1d.weight", "linear_qkv.weight"
# fmt: off
RULES = {
    "q_proj in halves":             ("logits",         of(QKV, laid_out(IN_HALVES))),
    "q and gate not by group":      ("logits",         of(QKV, laid_out(gated(Concat(0, (4, 4, 1, 1)), COLUMN)))),
    "in_proj by sections on disk":  ("logits",         of(IN, laid_out(FLAT))),
    "in_proj left by key head":     ("logits",         of(IN, laid_out(BY_HEAD))),
    "in_proj joined, then cut":     ("logits at tp=2", of(IN, laid_out(UNCUT))),
    "conv1d cut whole":             ("logits at tp=2", of(CONV, laid_out(COLUMN))),
    "decay for time step":          ("logits",         exchange("A_log", "dt_bias")),
    "out_proj dealt out":           ("logits at tp=2", of(OUT, laid_out(DEALT_ROW))),
    "decay replicated":             ("shapes at tp=2", of("A_log", laid_out(REPLICATED))),
    "norm of heads cut":            ("shapes at tp=2", of("out_norm.weight", laid_out(COLUMN))),
    "in_proj of the other family":  ("shapes",         of(IN, laid_out(DELTA))),
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
    assert fate == "logits" if tier == "logits" else "fit" in fate or "shape" in fate or "parts" in fate, fate
    if tp:
        assert found[1][name] == "survives"


def test_the_true_rules_survive(found):
    assert {at["none"] for at in found.values()} == {"survives"}
    assert DELTA_HEAD != FLAT
    assert DELTA_CONV != COLUMN


def with_one_added(self, heads):
    with mock.patch.object(self, "weight", torch.nn.Parameter(self.weight + 1)):
        return NORM(self, heads)


def of_the_first_rank(self, *arguments, **keywords):
    query, key, value, gate = super(modules.GatedSelfAttention, self).get_query_key_value_tensors(
        *arguments, **keywords
    )
    return query, key, value, gate[:, :, : query.size(2)]


NORM = modules.HeadNorm.forward
MISTAKES = {
    "norm of heads adds 1": lambda: mock.patch.object(modules.HeadNorm, "forward", with_one_added),
    "lengths not 1": lambda: mock.patch.object(modules, "_unit", lambda heads: heads),
    "a token sees the next": lambda: mock.patch.object(modules, "_ahead", lambda since: _ahead(since).triu(2)),
    "gates of the first rank": lambda: mock.patch.object(
        modules.GatedSelfAttention, "get_query_key_value_tensors", of_the_first_rank
    ),
    "none": contextlib.nullcontext,
}
if not megatron.core.__version__.startswith("0.16"):  # later releases cut the gates of all ranks themselves
    del MISTAKES["gates of the first rank"]
_ahead = modules._ahead


def mistaken(names, reference):
    found = {}
    for name in names:
        with MISTAKES[name]():
            (found[name],) = worst_differences([(HF, FOUR, reference)])
    return found


def test_killed_modules():
    found = pool.run(4, mistaken, list(MISTAKES), reference_logits(HF))[0]
    assert found.pop("none") < BOUND
    assert all(difference > 50 * BOUND for difference in found.values()), found


def trained_unsummed(folder):
    with (
        mock.patch.object(modules, "copy_to_tensor_model_parallel_region", lambda weight: weight),
        stepping.mesh(ParallelDims(tp=2)),
    ):
        return stepping.train(folder, ParallelDims(tp=2), tiny.tokens(2))["grads"]


def test_killed_gradient_of_the_norm_of_heads_not_summed():
    with tempfile.TemporaryDirectory() as folder:
        model = reference_model(HF, folder)
        (grads, _) = pool.run(2, trained_unsummed, folder)
    name = "model.layers.0.linear_attn.norm.weight"
    assert tiny.relative_error(grads[name], tiny.reference(model, tiny.tokens(2))[2][name]) > 1e-2
