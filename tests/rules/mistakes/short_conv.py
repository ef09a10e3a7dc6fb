"""Planted mistakes in the rules of short convolutions, in their layout, and in their module."""

from einops import rearrange
from torch import cat

from mcore_bridge.factory.modules import norms
from mcore_bridge.factory.modules.mixers import short_conv
from mcore_bridge.rules.layout import COLUMN, REPLICATED, Concat, Rearrange, Split
from tests.rules.mistakes.mamba import ordered
from tests.support.bounds import ONE
from tests.support.mutants import DEALT_ROW, exchange, instead, laid_out, of, parts

HF, MOE, LFM3 = "lfm2", "lfm2_moe", "lfm3"
PARTS = (1, 1, 1)
IN, CONV, OUT = "self_attention.in_proj.weight", "conv1d.weight", "self_attention.out_proj.weight"
BEHIND, DEALT = "linear_fc2.post_layernorm.weight", Rearrange("(n tp) ...", "tp n ...")
BY_RANK = Split(0, PARTS) >> Concat(0, PARTS) >> COLUMN
# fmt: off
RULES = {
    "in_proj cut whole":        ("logits at tp=2", HF, of(IN, laid_out(BY_RANK))),
    "B and C exchanged":        ("logits",         HF, of(IN, ordered(PARTS, 1, 0, 2))),
    "C and x exchanged":        ("logits",         HF, of(IN, ordered(PARTS, 0, 2, 1))),
    "convolution replicated":   ("shapes at tp=2", HF, of(CONV, laid_out(REPLICATED))),
    "out_proj dealt out":       ("logits at tp=2", HF, of(OUT, laid_out(DEALT_ROW))),
    "no rule of convolutions":  ("no rule",        HF, of(CONV, lambda rule: None)),
    "norms of q and k":         ("logits",         HF, exchange("q_layernorm.weight", "k_layernorm.weight")),
    "gate and up of experts":   ("logits",         MOE, of("experts.*.linear_fc1.weight", parts(1, 0))),
    "no bias of the router":    ("no rule",        MOE, of("router.expert_bias", lambda rule: None)),
    "gates dealt out":          ("logits at tp=2", LFM3, of("linear_gate.weight", laid_out(DEALT))),
    "norms around the MLP":     ("logits",         LFM3, exchange("pre_mlp_layernorm.weight", BEHIND)),
    "no norm behind mixers":    ("no rule",        LFM3, of("out_proj.post_layernorm.weight", lambda rule: None)),
    "norms of a layer":         ("logits",         HF, exchange("input_layernorm.weight", "pre_mlp_layernorm.weight")),
}
# fmt: on
_right = short_conv.ShortConv._all_convolved


def ahead(self, texts):
    """Each token sees the next one."""
    return [cat((text[1:], text[:1])) for text in _right(self, texts)]


def backwards(self, texts):
    return [text.flip(0) for text in _right(self, [text.flip(0) for text in texts])]


def activated(self, texts):
    """As the convolution of a Mamba-2 mixer."""
    return [text.sigmoid() * text for text in _right(self, texts)]


def ungated(self, texts):
    return self._all_convolved([rearrange(text, "s b (three n) -> three s b n", three=3)[2] for text in texts])


def unnormed(module, inputs, outputs):
    return outputs


MODULES = {
    "no norms behind": (LFM3, ONE, instead(norms, "_norm_output", unnormed)),
    "a token sees the next": (HF, ONE, instead(short_conv.ShortConv, "_all_convolved", ahead)),
    "the text backwards": (HF, ONE, instead(short_conv.ShortConv, "_all_convolved", backwards)),
    "an activation": (HF, ONE, instead(short_conv.ShortConv, "_all_convolved", activated)),
    "no gates": (HF, ONE, instead(short_conv.ShortConv, "_sequences", ungated)),
}
