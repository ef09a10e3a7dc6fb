"""Planted mistakes in layers with a Mamba-2 mixer beside their attention: each multiplier, and where it is applied."""

from torch import cat

from mcore_bridge.factory.modules import half_layers as beside
from mcore_bridge.factory.modules.mixers import mamba_mixer as mamba
from tests import zoo
from tests.support.bounds import ONE
from tests.support.mutants import exchange, instead

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


def scaled_up(self, hidden, *arguments, **named):
    both, bias = super(beside.ScaledGate, self).forward(hidden, *arguments, **named)
    gate, up = both.chunk(2, dim=-1)
    return cat((gate, up * beside.multipliers_of(self.config).gate), dim=-1), bias


def attention_alone(self, hidden, *arguments, **named):
    by = beside.multipliers_of(self.config)
    output, _ = super(beside.WithMixer, self).forward(hidden * by.attention_in, *arguments, **named)
    return output * by.attention_out, None


def one_after_the_other(self, hidden, *arguments, **named):
    """The mixer reads the output of attention."""
    by = beside.multipliers_of(self.config)
    output, _ = super(beside.WithMixer, self).forward(hidden * by.attention_in, *arguments, **named)
    output = output * by.attention_out
    return output + self.mixer(hidden + output)[0] * by.mixer_out, None


def ungated(self, hidden, gate):
    return hidden.to(gate.dtype)


MODULES = {
    **{name: (CASE, ONE, fields) for name, fields in FIELDS.items()},
    "up multiplied, not the gate": (CASE, ONE, instead(beside.ScaledGate, "forward", scaled_up)),
    "attention alone": (CASE, ONE, instead(beside.WithMixer, "forward", attention_alone)),
    "one after the other": (CASE, ONE, instead(beside.WithMixer, "forward", one_after_the_other)),
    "no gate of the mixer": (CASE, ONE, instead(mamba.Gate, "forward", ungated)),
}
RULES = {"norms": ("logits", CASE, exchange("input_layernorm.weight", "pre_mlp_layernorm.weight"))}
