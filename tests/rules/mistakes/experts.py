"""Planted mistakes in experts: in their rules, in the order of gate and up, in sinks, in the router."""

from dataclasses import replace

from mcore_bridge.factory.modules.experts import Router
from mcore_bridge.factory.modules.scores import ScoresCoreAttention
from mcore_bridge.rules.layout import COLUMN, GATED_UP, INTERLEAVED, REPLICATED, ROW, TRANSPOSED, Split
from tests.support.bounds import ONE
from tests.support.mutants import exchange, instead, laid_out, of, parts
from tests.support.strategies import tiny

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


def without_sinks(self, scores):
    return scores.softmax(-1)


def without_bias(self, input):
    self.expert_bias.zero_()
    return TRUE_GATING(self, input)


TRUE_GATING = Router.gating
MODULES = {
    "sinks left out": ("gpt_oss", ONE, instead(ScoresCoreAttention, "_softmax", without_sinks)),
    "router bias left out": ("glm4_moe", ONE, instead(Router, "gating", without_bias)),
}
