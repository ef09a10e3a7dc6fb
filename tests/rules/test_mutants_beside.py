"""Planted mistakes in layers with a Mamba-2 mixer beside their attention: each multiplier, and where it is applied."""

import contextlib
from unittest import mock

from torch import cat

from mcore_bridge.factory.modules import half_layers as beside
from mcore_bridge.factory.modules import mamba_mixer as mamba
from tests import zoo
from tests.support import mutants, pool
from tests.support.bounds import BOUND, TWO
from tests.support.parity import reference_logits, reference_of, worst_differences

CASE = "falcon_h1"
HF = zoo.cases()[CASE].hf
PARTS = HF.ssm_multipliers
LEFT_OUT = (
    *("embedding_multiplier", "lm_head_multiplier", "key_multiplier", "attention_in_multiplier"),
    *("attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"),
)


def exchanged(values, first, second):
    found = list(values)
    found[first], found[second] = found[second], found[first]
    return found


FIELDS = {
    **{f"no {name}": {name: 1.0} for name in LEFT_OUT},
    "no multiplier of the gate": {"mlp_multipliers": [1.0, HF.mlp_multipliers[1]]},
    "none of the MLP's output": {"mlp_multipliers": [HF.mlp_multipliers[0], 1.0]},
    **{f"that of {'zxBC'[at]} for the next": {"ssm_multipliers": exchanged(PARTS, at, at + 1)} for at in range(4)},
    "that of attention for the mixer": {
        "ssm_out_multiplier": HF.attention_out_multiplier,
        "attention_out_multiplier": HF.ssm_out_multiplier,
    },
}
"""What the config of the model that we build says instead."""


def scaled_up(self, hidden, *arguments, **named):
    both, bias = super(beside.ScaledGate, self).forward(hidden, *arguments, **named)
    gate, up = both.chunk(2, dim=-1)
    return cat((gate, up * beside.multipliers_of(self.config).gate), dim=-1), bias


def attention_alone(self, hidden, *arguments, **named):
    by = beside.multipliers_of(self.config)
    output, _ = super(beside.WithMixer, self).forward(hidden * by.attention_in, *arguments, **named)
    return output * by.attention_out, None


def one_after_the_other(self, hidden, *arguments, **named):
    """The mixer reads what attention has added."""
    by = beside.multipliers_of(self.config)
    output, _ = super(beside.WithMixer, self).forward(hidden * by.attention_in, *arguments, **named)
    output = output * by.attention_out
    return output + self.mixer(hidden + output)[0] * by.mixer_out, None


MODULES = {
    "up multiplied, not the gate": lambda: mock.patch.object(beside.ScaledGate, "forward", scaled_up),
    "attention alone": lambda: mock.patch.object(beside.WithMixer, "forward", attention_alone),
    "one after the other": lambda: mock.patch.object(beside.WithMixer, "forward", one_after_the_other),
    "no gate of the mixer": lambda: mock.patch.object(
        mamba.Gate, "forward", lambda self, hidden, gate: hidden.to(gate.dtype)
    ),
    "none": contextlib.nullcontext,
}


def wrong(hf, changes):
    for name, value in changes.items():
        setattr(hf, name, value)
    return hf


def mistaken(reference):
    """Runs in each worker: how far each mistake moves the logits."""
    found = {}
    for name, changes in FIELDS.items():
        (found[name],) = worst_differences([(wrong(zoo.cases()[CASE].hf, changes), TWO, reference)])
    for name, patch in MODULES.items():
        with patch():
            (found[name],) = worst_differences([(zoo.cases()[CASE].hf, TWO, reference)])
    return found


def fate_of_norms(reference):
    """Runs in each worker: what becomes of rules that exchange the norms of a layer."""
    wrong_rules = mutants.exchange("input_layernorm.weight", "pre_mlp_layernorm.weight")
    with mock.patch.dict(mutants.MUTANTS, {"norms": ("", wrong_rules), "none": ("", lambda rules: rules)}):
        return [mutants.fate(name, HF, 2, reference) for name in ("norms", "none")]


def test_killed_by_logits():
    assert pool.run(2, fate_of_norms, reference_logits(HF))[0] == ["logits", "survives"]
    found = pool.run(2, mistaken, reference_of(CASE))[0]
    assert found.pop("none") < BOUND
    assert {name: difference for name, difference in found.items() if difference < 50 * BOUND} == {}
