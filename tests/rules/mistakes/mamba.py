"""Planted mistakes in the rules of Mamba-2 mixers, in their layouts, and in the modules of layers of one half."""

from dataclasses import dataclass
from unittest import mock

import torch

from mcore_bridge.factory.modules.mixers import mamba_kernels
from mcore_bridge.factory.modules.mixers import mamba_kernels as mamba_scan
from mcore_bridge.factory.modules.mixers import mamba_mixer as mamba
from mcore_bridge.rules.layout import COLUMN, REPLICATED, Concat, Layout, Split
from tests.support.bounds import ONE, TWO
from tests.support.mutants import DEALT_ROW, exchange, instead, laid_out, of

HF = "nemotron_h"
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
    "in_proj cut whole":       ("logits at tp=2", HF, of("in_proj.weight", laid_out(COLUMN))),
    "z and x exchanged":       ("logits",         HF, of("in_proj.weight", ordered(IN, 1, 0, 2, 3, 4))),
    "B and C exchanged":       ("logits",         HF, of("in_proj.weight", ordered(IN, 0, 1, 3, 2, 4))),
    "time steps before C":     ("logits at tp=2", HF, of("in_proj.weight", laid_out(STEPS_FIRST))),
    "B and C in conv1d":       ("logits",         HF, of("conv1d.weight", ordered(CONV, 0, 2, 1))),
    "B and C in its bias":     ("logits",         HF, of("conv1d.bias", ordered(CONV, 0, 2, 1))),
    "conv1d cut whole":        ("logits at tp=2", HF, of("conv1d.weight", laid_out(COLUMN))),
    "its bias cut whole":      ("logits at tp=2", HF, of("conv1d.bias", laid_out(COLUMN))),
    "decay for time step":     ("logits",         HF, exchange("A_log", "dt_bias")),
    "skip for decay":          ("logits",         HF, exchange("A_log", "self_attention.D")),
    "skip for time step":      ("logits",         HF, exchange("dt_bias", "self_attention.D")),
    "out_proj dealt out":      ("logits at tp=2", HF, of("out_proj.weight", laid_out(DEALT_ROW))),
    "skip replicated":         ("shapes at tp=2", HF, of("self_attention.D", laid_out(REPLICATED))),
    "decay replicated":        ("shapes at tp=2", HF, of("A_log", laid_out(REPLICATED))),
    "time step replicated":    ("shapes at tp=2", HF, of("dt_bias", laid_out(REPLICATED))),
    "norm replicated":         ("shapes at tp=2", HF, of("self_attention.norm.weight", laid_out(REPLICATED))),
}
# fmt: on


_norm, _ahead, _scan = mamba.GroupNorm.forward, mamba_scan._ahead, mamba_kernels.scan


def ungrouped(self, hidden, gate):
    with mock.patch.object(self.groups, "count", 1):
        return _norm(self, hidden, gate)


_whole = mamba.Groups.whole


def alone(norm):
    """Ranks of one group do not exchange their mean squares, or else their rows of B and C."""

    def whole(self, part):
        is_norm = part.size(-1) == self.count
        return part.unsqueeze(-2).repeat_interleave(self.sharers, -2) if is_norm == norm else _whole(self, part)

    return "granitemoehybrid", TWO, instead(mamba.Groups, "whole", whole)


def no_gate(self, hidden, gate):
    return _norm(self, hidden, torch.ones_like(gate))


def exchanged(x, steps, decay, into, out_of, skip):
    return _scan(x, steps, decay, out_of, into, skip)


def no_skip(*parts):
    return _scan(*parts[:5], torch.zeros_like(parts[5]))


MODULES = {
    "one norm of all groups": (HF, ONE, instead(mamba.GroupNorm, "forward", ungrouped)),
    "no gate": (HF, ONE, instead(mamba.GroupNorm, "forward", no_gate)),
    "a token sees the next": (HF, ONE, instead(mamba_scan, "_ahead", lambda since: _ahead(since).triu(2))),
    "B for C": (HF, ONE, instead(mamba_kernels, "scan", exchanged)),
    "no skip": (HF, ONE, instead(mamba_kernels, "scan", no_skip)),
    "norms of a part": alone(norm=True),
    "B and C of a part": alone(norm=False),
}
