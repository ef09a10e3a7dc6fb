"""Planted mistakes for families whose layers have different sizes: in axes, ropes and gates."""

from dataclasses import replace

from mcore_bridge.config.fields import Const, Ignore
from mcore_bridge.config.tables.derived_rope import SLIDES_OR_NOPE
from mcore_bridge.factory.modules.attention_gate import GatedOutput
from mcore_bridge.factory.modules.layer_rope import OwnRope
from mcore_bridge.rules.layout import REPLICATED, Rearrange
from tests.rules.mistakes.plain import entries
from tests.support.bounds import ONE
from tests.support.mutants import exchange, instead, laid_out, of

DEALT = Rearrange("(n tp) ...", "tp n ...")
NORMS = ("linear_proj.post_layernorm.weight", "pre_mlp_layernorm.weight")
# fmt: off
RULES = {
    # name                      killed by,        model     mutation of the rules
    "gates dealt out":          ("logits at tp=2", "laguna", of("linear_gate.weight", laid_out(DEALT))),
    "gates on every rank":      ("shapes at tp=2", "laguna", of("linear_gate.weight", laid_out(REPLICATED))),
    "norms exchanged":          ("logits", "afmoe", exchange(*NORMS)),
    "gates forgotten":          ("no rule", "laguna", of("linear_gate.weight", lambda rule: None)),
}
# fmt: on


def always_full(self, *inputs, rotary_pos_emb, **options):
    return super(OwnRope, self).forward(*inputs, rotary_pos_emb=rotary_pos_emb[0], **options)


def whole(self, *inputs, rotary_pos_emb, **options):
    return super(OwnRope, self).forward(*inputs, rotary_pos_emb=rotary_pos_emb[self.rope], **options)


def ungated(self, proj, inputs):
    return inputs


def neighbours_gate(self, proj, inputs):
    gate, self.gate = self.gate.roll(1, -1), None
    gated = inputs[0].unflatten(-1, (gate.size(-1), -1)) * gate.unsqueeze(-1)
    return (gated.flatten(-2), *inputs[1:])


def by_sigmoid(self, *inputs, **options):
    """Gates of another activation."""
    self.config.attention_gate_activation = "sigmoid"
    return TRUE_FORWARD(self, *inputs, **options)


NO_MUP = Ignore("a mistake", ("mup_enabled",))
TRUE_FORWARD = GatedOutput.forward


def softplus(self, *inputs, **options):
    self.config.attention_gate_activation = "softplus"
    return TRUE_FORWARD(self, *inputs, **options)


def rotated(kinds):
    """Layers with a rope, as if they were layers without a window: 1 for each layer that does not rotate."""
    wrong = replace(SLIDES_OR_NOPE, forward=lambda hf: {**SLIDES_OR_NOPE.forward(hf), "no_rope_freq": kinds})
    return lambda: entries("afmoe", wrong)


MODULES = {
    "a rope in every layer": ("afmoe", ONE, rotated(None)),
    "a rope in the other layers": ("afmoe", ONE, rotated([1, 0, 1, 0])),
    "softplus gates": ("afmoe", ONE, instead(GatedOutput, "forward", softplus)),
    "embeddings without their scale": ("afmoe", ONE, lambda: entries("afmoe", Const("embedding_scale", None), NO_MUP)),
    "one rope in every layer": ("laguna", ONE, instead(OwnRope, "forward", always_full)),
    "zeros behind angles taken for angles": ("laguna", ONE, instead(OwnRope, "forward", whole)),
    "no gates": ("laguna", ONE, instead(GatedOutput, "_multiply", ungated)),
    "gates of the neighbours": ("laguna", ONE, instead(GatedOutput, "_multiply", neighbours_gate)),
    "gates of other elements": ("laguna-elements-yarn-bias", ONE, instead(GatedOutput, "_multiply", neighbours_gate)),
    "sigmoid gates": ("laguna", ONE, instead(GatedOutput, "forward", by_sigmoid)),
}
