"""Planted mistakes for norms without weights, multiplied and capped logits, and layers without a rope."""

from mcore_bridge.config.fields import Const
from mcore_bridge.factory.modules import norms
from mcore_bridge.rules.layout import Rearrange
from tests.rules.mistakes.plain import derived, entries
from tests.support.bounds import ONE
from tests.support.mutants import exchange, instead, laid_out, nothing, of
from tests.zoo import NEWEST

HF, APART = "muse_glimmer", "muse_glimmer-windows-and-nope-apart"
BEHIND = ("linear_proj.post_layernorm.weight", "linear_fc2.post_layernorm.weight")
# fmt: off
RULES = {
    "gates dealt out":  ("logits at tp=2", HF, of("linear_gate.weight", laid_out(Rearrange("(n tp) ...", "tp n ...")))),
    "gates forgotten":  ("no rule",        HF, of("linear_gate.weight", lambda rule: None)),
    "norms behind":     ("logits",         HF, exchange(*BEHIND)),
    "norms before":     ("logits",         HF, exchange("input_layernorm.weight", "pre_mlp_layernorm.weight")),
} if NEWEST else {}
# fmt: on


def said(field, **values):
    """The entry of a field that gives these values."""
    return lambda: entries("muse_glimmer_text", derived(field, lambda hf: values))


CENTERED = Const("final_norm_centered", True)
MODULES = (
    {
        "queries and keys without a norm": (HF, ONE, instead(norms.UnitNorm, "forward", lambda self, hidden: hidden)),
        "queries not multiplied": (HF, ONE, said("qk_scale_factor", softmax_scale=None)),
        "embeddings without a norm": (HF, ONE, instead(norms, "norm_embedding", nothing)),
        "a final norm around zero": (HF, ONE, lambda: entries("muse_glimmer_text", CENTERED)),
        "one epsilon": (HF, ONE, said("post_norm_eps")),
        "a rope in every layer": (HF, ONE, said("layer_rope_theta", no_rope_freq=None)),
        "no rope where no window is": (APART, ONE, said("layer_rope_theta", no_rope_freq=[0, 0, 0, 1])),
        "logits not multiplied": (HF, ONE, said("output_multiplier", logit_scale=None)),
        "logits not capped": (HF, ONE, said("final_logit_softcapping", logit_softcap=None)),
    }
    if NEWEST
    else {}
)
