"""Planted mistakes in linear attention and gated full attention: in rules, layouts, and code that affects gradients."""

from unittest import mock

import megatron.core
import torch

from mcore_bridge import ParallelDims
from mcore_bridge.factory.modules.mixers import delta as modules
from mcore_bridge.rules.layout import COLUMN, GROUPS, REPLICATED, Concat, Leading, Split
from mcore_bridge.rules.mixer_layouts import DELTA, KEY_HEADS, Q_AND_GATE
from tests.support.bounds import FOUR, ONE
from tests.support.mutants import DEALT_ROW, exchange, instead, itself, laid_out, of, parts
from tests.zoo.delta import EXPERTS, SQUARE, delta

HF = delta(
    "qwen3_next",
    **{**EXPERTS, **SQUARE, "vocab_size": 90, "layer_types": ["linear_attention", "full_attention"]},
    num_hidden_layers=2,
    mlp_only_layers=[0, 1],
).hf
OLMO, CONVOLVED = "olmo_hybrid", ("key", "key", "value")
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
    "q_proj in halves":             ("logits",         HF, of(QKV, laid_out(IN_HALVES))),
    "q and gate not by group":      ("logits",         HF, of(QKV, laid_out(gated(Concat(0, (4, 4, 1, 1)), COLUMN)))),
    "in_proj by sections on disk":  ("logits",         HF, of(IN, laid_out(FLAT))),
    "in_proj left by key head":     ("logits",         HF, of(IN, laid_out(BY_HEAD))),
    "in_proj joined, then cut":     ("logits at tp=2", HF, of(IN, laid_out(UNCUT))),
    "conv1d cut whole":             ("logits at tp=2", HF, of(CONV, laid_out(COLUMN))),
    "decay for time step":          ("logits",         HF, exchange("A_log", "dt_bias")),
    "out_proj dealt out":           ("logits at tp=2", HF, of(OUT, laid_out(DEALT_ROW))),
    "decay replicated":             ("shapes at tp=2", HF, of("A_log", laid_out(REPLICATED))),
    "norm of heads cut":            ("shapes at tp=2", HF, of("out_norm.weight", laid_out(COLUMN))),
    "in_proj of the other family":  ("shapes",         HF, of(IN, laid_out(DELTA))),
    "parts joined, then cut":       ("logits at tp=2", OLMO, of(IN, laid_out(Concat(0, SECTIONS) >> COLUMN))),
    "beta for alpha":               ("logits",         OLMO, of(IN, parts(0, 1, 2, 3, 5, 4))),
    "gates for values":             ("logits",         OLMO, of(IN, parts(0, 1, 3, 2, 4, 5))),
    "convolutions joined, then cut": ("logits at tp=2", OLMO, of(CONV, laid_out(Concat(0, CONVOLVED) >> COLUMN))),
    "convolutions of q and k":      ("logits",         OLMO, of(CONV, parts(1, 0, 2))),
}
# fmt: on


def with_one_added(self, heads):
    with mock.patch.object(self, "weight", torch.nn.Parameter(self.weight + 1)):
        return NORM(self, heads)


def of_the_first_rank(self, *arguments, **keywords):
    query, key, value, gate = super(modules.GatedSelfAttention, self).get_query_key_value_tensors(
        *arguments, **keywords
    )
    return query, key, value, gate[:, :, : query.size(2)]


def with_epsilon_of_layers(self, config, hidden_size, eps=1e-5):
    NORM_INIT(self, config, hidden_size)
    self.eps = eps


NORM, NORM_INIT = modules.HeadNorm.forward, modules.HeadNorm.__init__
MODULES = {
    "norm of heads adds 1": (HF, ONE, instead(modules.HeadNorm, "forward", with_one_added)),
    "no negative eigenvalues": (OLMO, ONE, {"linear_allow_neg_eigval": False}),
    "epsilon of the layers' norms": (OLMO, ONE, instead(modules.HeadNorm, "__init__", with_epsilon_of_layers)),
    "lengths not 1": (HF, ONE, instead(modules, "_unit", itself)),
    "a token sees the next": (HF, ONE, instead(modules, "_ahead", lambda since: _ahead(since).triu(2))),
    "gates of the first rank": (
        *(HF, FOUR),
        instead(modules.GatedSelfAttention, "get_query_key_value_tensors", of_the_first_rank),
    ),
}
if not megatron.core.__version__.startswith("0.16"):  # later releases cut the gates of all ranks themselves
    del MODULES["gates of the first rank"]
_ahead = modules._ahead

GRADIENTS = {
    "norm of heads not summed": (
        *(HF, ParallelDims(tp=2)),
        instead(modules, "copy_to_tensor_model_parallel_region", itself),
    )
}
