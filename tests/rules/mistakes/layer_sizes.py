"""Planted mistakes for families whose layers have different sizes: in axes, ropes and gates."""

from mcore_bridge.factory.modules.attention_gate import GatedOutput
from mcore_bridge.factory.modules.layer_rope import OwnRope
from mcore_bridge.rules.layout import REPLICATED, Rearrange
from tests.support.bounds import ONE
from tests.support.mutants import instead, laid_out, of

DEALT = Rearrange("(n tp) ...", "tp n ...")
# fmt: off
RULES = {
    # name                      killed by,        model     mutation of the rules
    "gates dealt out":          ("logits at tp=2", "laguna", of("linear_gate.weight", laid_out(DEALT))),
    "gates on every rank":      ("shapes at tp=2", "laguna", of("linear_gate.weight", laid_out(REPLICATED))),
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


TRUE_FORWARD = GatedOutput.forward
MODULES = {
    "one rope in every layer": ("laguna", ONE, instead(OwnRope, "forward", always_full)),
    "zeros behind angles taken for angles": ("laguna", ONE, instead(OwnRope, "forward", whole)),
    "no gates": ("laguna", ONE, instead(GatedOutput, "_multiply", ungated)),
    "gates of the neighbours": ("laguna", ONE, instead(GatedOutput, "_multiply", neighbours_gate)),
    "gates of other elements": ("laguna-elements-yarn-bias", ONE, instead(GatedOutput, "_multiply", neighbours_gate)),
    "sigmoid gates": ("laguna", ONE, instead(GatedOutput, "forward", by_sigmoid)),
}
