"""Planted mistakes in the rules of Kimi delta attention, in its layouts, and in its module."""

import torch
from einops import rearrange

from mcore_bridge.factory.modules import attention_gate, rotary
from mcore_bridge.factory.modules.mixers import kda
from mcore_bridge.rules.layout import COLUMN, REPLICATED, Concat, Rearrange
from tests.support.bounds import ONE, TWO
from tests.support.mutants import DEALT_ROW, exchange, instead, itself, laid_out, of, parts

HF, LING = "kimi_linear", "bailing_hybrid"
FULL = ("kda_inner", "kda_inner", "kda_inner", "kda_heads", "kda_inner", "kda_inner")
DEALT = Rearrange("(n tp) ...", "tp n ...")
SECTIONS = ("kda_inner", "kda_inner", "kda_inner", "kda_heads", "kda_dim", "kda_dim")
IN, CONV, OUT = "in_proj.weight", "conv1d.weight", "self_attention.out_proj.weight"
# fmt: off
RULES = {
    "in_proj joined, then cut":   ("logits at tp=2", HF, of(IN, laid_out(Concat(0, SECTIONS) >> COLUMN))),
    "q and k exchanged":          ("logits",         HF, of(IN, parts(1, 0, 2, 3, 4, 5))),
    "k and v exchanged":          ("logits",         HF, of(IN, parts(0, 2, 1, 3, 4, 5))),
    "decay and gate exchanged":   ("logits",         HF, of(IN, parts(0, 1, 2, 3, 5, 4))),
    "k and v in conv1d":          ("logits",         HF, of(CONV, parts(0, 2, 1))),
    "conv1d joined, then cut":    ("logits at tp=2", HF, of(CONV, laid_out(Concat(0, (1, 1, 1)) >> COLUMN))),
    "wide decay and gate":        ("logits",         HF, exchange("decay_up.weight", "gate_up.weight")),
    "decay replicated":           ("shapes at tp=2", HF, of("A_log", laid_out(REPLICATED))),
    "time step replicated":       ("shapes at tp=2", HF, of("dt_bias", laid_out(REPLICATED))),
    "out_proj dealt out":         ("logits at tp=2", HF, of(OUT, laid_out(DEALT_ROW))),
    "norm of heads cut":          ("shapes at tp=2", HF, of("out_norm.weight", laid_out(COLUMN))),
    "no bias of the router":      ("no rule",        HF, of("router.expert_bias", lambda rule: None)),
    "gate and up of shared":      ("logits",         HF, of("shared_experts.linear_fc1.weight", parts(1, 0))),
    "all joined, then cut":       ("logits at tp=2", LING, of(IN, laid_out(Concat(0, FULL) >> COLUMN))),
    "whole decay and gate":       ("logits",         LING, of(IN, parts(0, 1, 2, 3, 5, 4))),
    "decay of heads dealt out":   ("logits at tp=2", LING, of("A_log", laid_out(DEALT))),
    "time steps dealt out":       ("logits at tp=2", LING, of("dt_bias", laid_out(DEALT))),
    "gates of heads dealt out":   ("logits at tp=2", LING, of("linear_gate.weight", laid_out(DEALT))),
    "gates of heads replicated":  ("shapes at tp=2", LING, of("linear_gate.weight", laid_out(REPLICATED))),
    "output of latents dealt out": ("logits at tp=2", LING, of("linear_proj.weight", laid_out(DEALT_ROW))),
}
# fmt: on
_rule, _gathered, _made = kda.channel_delta_rule, kda.all_gather_last_dim_from_tensor_parallel_region, kda._ahead


def by_head(query, key, value, decay, beta):
    """As the gated delta rule of other families: a head has one decay."""
    return _rule(query, key, value, decay.mean(-1, keepdim=True).expand_as(decay), beta)


def unscaled(query, key, value, decay, beta):
    return _rule(query * 1.0, key, value, decay, torch.ones_like(beta))


def by_rank(narrow, group):
    """Gates and decays of the ranks in the order in which they come."""
    return rearrange(_gathered(narrow, group=group), "s b (tp two n) -> s b (two tp n)", two=2, tp=group.size())


def turned(self, *arguments, **keywords):
    """A rope, as in deepseek_v3."""
    self.inv_freq = self.rope.frequencies(None)
    return _frequencies(self, *arguments, **keywords)


def of_softplus(self, steps):
    """As in Kimi Linear: the decay has no bound."""
    return -self.A_log.float().exp().view(-1, 1) * torch.nn.functional.softplus(steps)


def unrated(self, steps):
    return self.lower_bound * steps.sigmoid()


def opened(self, proj, inputs):
    return inputs


_frequencies = rotary.HFRotaryEmbedding.frequencies
MODULES = {
    "a decay for each head": (HF, ONE, instead(kda, "channel_delta_rule", by_head)),
    "no beta": (HF, ONE, instead(kda, "channel_delta_rule", unscaled)),
    "lengths not 1": (HF, ONE, instead(kda, "_unit", itself)),
    "a token sees the next": (HF, ONE, instead(kda, "_ahead", lambda since: _made(since).triu(2))),
    "narrow inputs by rank": (HF, TWO, instead(kda, "all_gather_last_dim_from_tensor_parallel_region", by_rank)),
    "a rope": (HF, ONE, instead(rotary.UnrotatedEmbedding, "frequencies", turned)),
    "no bound of the decay": (LING, ONE, instead(kda.KimiDeltaAttention, "_bounded", of_softplus)),
    "no rate in the bound": (LING, ONE, instead(kda.KimiDeltaAttention, "_bounded", unrated)),
    "another bound": (LING, ONE, {"kda_lower_bound": -5.0}),
    "no gates of heads": (LING, ONE, instead(attention_gate.GatedOutput, "_multiply", opened)),
}
