"""Planted mistakes for families whose layers have different sizes: in axes, ropes and gates."""

from dataclasses import replace
from unittest import mock

from torch import cat
from torch.nn.functional import pad

from mcore_bridge.config.fields import Const, Ignore
from mcore_bridge.config.rope import Rope
from mcore_bridge.config.tables import by_layer
from mcore_bridge.config.tables.derived_rope import SLIDES_OR_NOPE
from mcore_bridge.factory.modules import gate_limits, layer_inputs
from mcore_bridge.factory.modules.attention_gate import GatedOutput
from mcore_bridge.factory.modules.convolved import ConvolvedSum, ResidualConv
from mcore_bridge.factory.modules.experts_beside import Beside, ScaledRouter
from mcore_bridge.factory.modules.layer_rope import OwnRope
from mcore_bridge.factory.modules.multipliers import ScaledSum
from mcore_bridge.factory.modules.norms import UnitNorm
from mcore_bridge.factory.modules.scored_sharing import ScoringRouter, WeighedExperts
from mcore_bridge.factory.modules.scores import RelativeCoreAttention
from mcore_bridge.factory.modules.shared_keys import KeepsKeys
from mcore_bridge.factory.modules.values import KeysAsValues, NormedValues, SizedValues
from mcore_bridge.rules.layout import COLUMN, QKV, REPLICATED, Concat, Rearrange
from tests import zoo
from tests.rules.mistakes.plain import entries
from tests.support.bounds import FOUR, ONE, TWO
from tests.support.mutants import exchange, instead, itself, laid_out, of, parts

DEALT = Rearrange("(n tp) ...", "tp n ...")
DEALT_PARTS = DEALT >> Concat(1, ratio=(1, 1))
SHARED_FC1 = "shared_experts.linear_fc1.weight"
NOT_GROUPED = COLUMN >> Concat(1, ratio=("heads_per_group", 1))
OF_WIDTHS = COLUMN >> Concat(1, ratio=("query_rows", "key_rows", "value_rows"))
DEALT_COLUMNS = Rearrange("shared n (m tp)", "tp shared n m")
NORMS = ("linear_proj.post_layernorm.weight", "pre_mlp_layernorm.weight")
# fmt: off
RULES = {
    "scores of heads dealt":    ("logits at tp=2", "inkling", of("linear_relative.weight", laid_out(DEALT))),
    "convolutions exchanged":   ("logits", "inkling", exchange("k_conv.weight", "v_conv.weight")),
    "convolutions of halves":   ("logits", "inkling", exchange("self_attn_bda.conv.weight", "mlp_bda.conv.weight")),
    "shared gates for values":  ("logits", "inkling", of("shared_experts.gate_up", parts(1, 0))),
    "shared experts' rows dealt": ("logits at tp=2", "inkling", of("shared_experts.down", laid_out(DEALT_COLUMNS))),
    "profiles forgotten":       ("no rule", "inkling", of("core_attention.profiles", lambda rule: None)),
    "no norm of embeddings":    ("no rule", "inkling", of("embedding.layernorm.weight", lambda rule: None)),
    # name                      killed by,        model     mutation of the rules
    "gates dealt out":          ("logits at tp=2", "laguna", of("linear_gate.weight", laid_out(DEALT))),
    "gates on every rank":      ("shapes at tp=2", "laguna", of("linear_gate.weight", laid_out(REPLICATED))),
    "norms exchanged":          ("logits", "afmoe", exchange(*NORMS)),
    "keys behind all queries":  ("logits at tp=2", "gemma4-biased", of("linear_qk.weight", laid_out(NOT_GROUPED))),
    "second embedding on every rank": ("shapes at tp=2", "gemma4-shared",
                                       of("layer_inputs.word_embeddings.weight", laid_out(REPLICATED))),
    "queries alone dealt out":  ("logits at tp=2", "gemma4-shared", of("linear_q_proj.weight", laid_out(DEALT))),
    "norms of inputs and MLPs": ("logits", "gemma4-shared", exchange("mlp_bda.layernorm.weight", NORMS[1])),
    "narrow values not grouped": ("logits", "mimo_v2_flash", of("linear_qkv.weight", laid_out(OF_WIDTHS))),
    "values as wide as keys":   ("shapes", "mimo_v2_flash", of("linear_qkv.weight", laid_out(QKV))),
    "values before keys":       ("shapes", "mimo_v2_flash", of("linear_qkv.weight", parts(0, 2, 1))),
    "sinks of heads dealt out": ("logits at tp=2", "mimo_v2_flash", of("softmax_offset", laid_out(DEALT))),
    "keys before queries":      ("shapes", "gemma4", of("linear_qk.weight", parts(1, 0))),
    "routed norm for dense":    ("logits", "gemma4-experts", exchange("mlp.routed_layernorm.weight",
                                                                      "mlp.dense_layernorm.weight")),
    "routed sum for dense sum": ("logits", "gemma4-experts", exchange("mlp.routed_post_layernorm.weight",
                                                                      "shared_experts.linear_fc2.post_layernorm.weight")),
    "routed sum for whole sum": ("logits", "gemma4-experts", exchange("mlp.routed_post_layernorm.weight",
                                                                      "mlp.post_layernorm.weight")),
    "router's scales forgotten": ("no rule", "gemma4-experts", of("router.expert_scale", lambda rule: None)),
    "router's scale cut":       ("shapes at tp=2", "gemma4-experts", of("input_scale", laid_out(COLUMN))),
    "scales forgotten":         ("no rule", "gemma4", of("layer_scalar", lambda rule: None)),
    "experts' gates and values": ("logits", "step3p5", of("experts.*.linear_fc1.weight", parts(1, 0))),
    "shared experts dealt":     ("logits at tp=2", "step3p5", of(SHARED_FC1, laid_out(DEALT_PARTS))),
    "router without its bias":  ("no rule", "step3p5", of("router.expert_bias", lambda rule: None)),
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


TRUE_HEADS = KeysAsValues.get_query_key_value_tensors


def normed_keys(self, *inputs, **options):
    """Keys behind their norm as values."""
    query, key, _ = TRUE_HEADS(self, *inputs, **options)
    return query, key, key


def unnormed(self, *inputs, **options):
    return super(NormedValues, self).get_query_key_value_tensors(*inputs, **options)


def unscaled(self, training, fused):
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add

    return get_bias_dropout_add(training, fused)


def scaled_before(self, training, fused):
    """The scale multiplies the output of the MLP before it is added."""
    add = unscaled(self, training, fused)
    return lambda output, residual, rate: add((output[0] * self.layer_scalar, output[1]), residual, rate)


def in_gemma4(name, value):
    return lambda: entries("gemma4_text", Const(name, value))


def routed(**wrong):
    """The router with other parts: its norm, its root or its scales of experts."""

    def forward(self, inputs, *mask):
        part = {"norm": self.norm, "root": self.root, "scales": self.expert_scale, **wrong}
        scaled = part["norm"](inputs) * self.input_scale * part["root"]
        weights, chosen = super(ScaledRouter, self).forward(scaled, *mask)
        return weights * part["scales"], chosen

    return instead(ScaledRouter, "forward", forward)


def unscaled_values(self, *inputs, **options):
    return super(SizedValues, self).get_query_key_value_tensors(*inputs, **options)


def scaled_scores(self, inputs, *mask):
    """Scales of experts before the choice of experts, and before their weights are normed."""
    true = self.weight
    with mock.patch.dict(self._parameters, weight=true * self.expert_scale[:, None]):
        return super(ScaledRouter, self).forward(self.norm(inputs) * self.input_scale * self.root, *mask)


def unnormed_dense(self, hidden):
    return super(Beside, self).shared_experts_compute(self.routed_layernorm(hidden))


def unnormed_routed(self, hidden, *routing):
    return super(Beside, self).preprocess(hidden, *routing)


def normed_together(self, output, dense):
    return self.routed_post_layernorm(super(Beside, self).postprocess(output, dense))


def unlimited_values(module, inputs, outputs):
    gates, values = outputs[0].chunk(2, -1)
    return cat((gates.clamp(max=module.gate_limit), values), -1), outputs[1]


def clamped_below(module, inputs, outputs):
    """Gates with a limit on both sides."""
    output, bias = TRUE_CLAMP(module, inputs, outputs)
    return output.clamp(min=-module.limit), bias


TRUE_CLAMP = gate_limits._clamp
EXCHANGED = {"swiglu_limits": "glu_limit", "swiglu_limits_shared": "expert_glu_limit"}


def with_next(self, total):
    """The input of the layer before, as if layers were numbered from 1."""
    self.given = self.given.roll(1, -1)
    return TRUE_SUM(self, total)


def ungated_input(self, total):
    return total + self.layernorm(self.projection(self.given)[0])


def of_tokens_alone(self, tokens, embedded):
    """Inputs without the projection of the first embedding."""
    return TRUE_INPUTS(self, tokens, embedded.mul(0))


def unmarked():
    """Weights that every rank applies to its own tokens, not marked as such."""
    true = layer_inputs.ReplicatedLinear.__init__

    def mistaken(self, *sizes, **arguments):
        true(self, *sizes, **arguments)
        self.weight.sequence_parallel = False

    return mock.patch.object(layer_inputs.ReplicatedLinear, "__init__", mistaken)


def dropped(self, *inputs, **options):
    """Keys of which the layer that computes them gets no gradient from other layers."""
    query, key, value = super(KeepsKeys, self).get_query_key_value_tensors(*inputs, **options)
    self.kept = key.detach(), value
    return query, key, value


TRUE_SUM, TRUE_INPUTS = layer_inputs.LayerInput.added, layer_inputs.LayerInputs.forward
SHARED = zoo.written()["gemma4-shared"]


def nearer(self, query, key, places):
    """Distances of one token less."""
    return TRUE_DISTANCES(self, query, key, places - 1)


def endless(self, query, key, places):
    """Keys farther than the extent have the last score."""
    self.extent = 1000
    profiles = pad(self.profiles, (0, 1000 - self.profiles.size(1)), mode="replicate")
    with mock.patch.dict(self._parameters, profiles=profiles):
        return TRUE_DISTANCES(self, query, key, places)


def convolved(**wrong):
    """A convolution of other tokens or channels, or one whose backward sums less."""

    def forward(self, tokens, first, text, *, copied):
        return TRUE_CONVOLVED(self, tokens, wrong.get("first", first), text, copied=wrong.get("copied", copied))

    return instead(ResidualConv, "forward", forward)


def unconvolved(self, output):
    return output


def plain_sharing(self, logits, *mask, **named):
    """Weights of routed experts without a share for the others."""
    true = TRUE_ROUTING(self, logits, *mask, **named)
    routed = logits[..., : self.config.num_moe_experts].contiguous()
    return super(ScoringRouter, self).routing(routed, *mask, **named)[0], true[1]


def evenly(self, hidden, weights):
    return TRUE_SHARED(self, hidden, weights.mean(-1, keepdim=True).expand_as(weights))


TRUE_DISTANCES, TRUE_CONVOLVED = RelativeCoreAttention._scores, ResidualConv.forward
TRUE_ROUTING, TRUE_SHARED = ScoringRouter.routing, WeighedExperts.forward
INKLING = {
    "distances off by one": ("inkling", ONE, instead(RelativeCoreAttention, "_scores", nearer)),
    "scores at every distance": ("inkling", ONE, instead(RelativeCoreAttention, "_scores", endless)),
    "channels of the first rank": ("inkling", TWO, convolved(first=0)),
    "outputs not convolved": ("inkling", ONE, instead(ConvolvedSum, "_convolved", unconvolved)),
    "shared experts beside the sum": ("inkling", ONE, instead(ScoringRouter, "routing", plain_sharing)),
    "shared experts of one weight": ("inkling", ONE, instead(WeighedExperts, "forward", evenly)),
    "queries that do not grow": ("inkling", ONE, {"log_scaling_n_floor": None}),
    "an extent of one token less": ("inkling", ONE, {"rel_extent": 8}),
}
INKLING_HF = zoo.written()["inkling"]
GRADIENTS = (
    {
        "inputs of layers without their mark": (SHARED.hf, TWO, unmarked),
        "keys without gradients of readers": (
            *(SHARED.hf, ONE),
            instead(KeepsKeys, "get_query_key_value_tensors", dropped),
        ),
        **(
            {"convolutions of one rank's heads": (INKLING_HF.hf, TWO, convolved(copied=False))}
            if zoo.here(["inkling"])
            else {}
        ),
    }
    if zoo.here(["gemma4-shared"])
    else {}
)
MODULES = {
    **INKLING,
    "inputs of neighbours": ("gemma4-shared", ONE, instead(layer_inputs.LayerInput, "added", with_next)),
    "inputs without gates": ("gemma4-shared", ONE, instead(layer_inputs.LayerInput, "added", ungated_input)),
    "inputs of tokens alone": ("gemma4-shared", ONE, instead(layer_inputs.LayerInputs, "forward", of_tokens_alone)),
    "second embedding without its scale": (
        *("gemma4-shared", ONE),
        instead(layer_inputs, "EmbeddingScale", lambda scale: lambda module, inputs, output: None),
    ),
    "values without their scale": (
        "mimo_v2_flash",
        ONE,
        instead(SizedValues, "get_query_key_value_tensors", unscaled_values),
    ),
    "queries of the first of four": ("mimo_v2_flash-biased", FOUR, instead(SizedValues, "_rank", 0)),
    "a window of one token less": ("mimo_v2_flash", ONE, {"sliding_window": 4}),
    "a router without a norm": ("gemma4-experts", ONE, routed(norm=itself)),
    "a router without the root": ("gemma4-experts", ONE, routed(root=1.0)),
    "experts without scales": ("gemma4-experts", ONE, routed(scales=1.0)),
    "scales of experts before their choice": ("gemma4-experts", ONE, instead(ScaledRouter, "forward", scaled_scores)),
    "one norm before MLP and experts": (
        "gemma4-experts",
        ONE,
        instead(Beside, "shared_experts_compute", unnormed_dense),
    ),
    "experts without a norm": ("gemma4-experts", ONE, instead(Beside, "preprocess", unnormed_routed)),
    "a norm of both sums": ("gemma4-experts", ONE, instead(Beside, "postprocess", normed_together)),
    "no limits": ("step3p5", ONE, instead(gate_limits, "_clamp", lambda module, inputs, outputs: outputs)),
    "limits before SiLU": ("step3p5", ONE, instead(gate_limits, "silu_inverse", lambda limit: limit)),
    "limits of gates alone": ("step3p5", ONE, instead(gate_limits, "_clamp", unlimited_values)),
    "limits of gates below": ("step3p5", ONE, instead(gate_limits, "_clamp", clamped_below)),
    "limits of experts and MLPs": ("step3p5", ONE, instead(by_layer, "_LIMITS", EXCHANGED)),
    "norms around one": ("step3p5", ONE, lambda: entries("step3p5", Const("layernorm_zero_centered_gamma", False))),
    "values normed like keys": ("gemma4", ONE, instead(KeysAsValues, "get_query_key_value_tensors", normed_keys)),
    "values without a norm": ("gemma4-own-values", ONE, instead(NormedValues, "get_query_key_value_tensors", unnormed)),
    "keys as values without a norm": ("gemma4", ONE, instead(UnitNorm, "forward", lambda self, hidden: hidden)),
    "queries of the first rank": ("gemma4", FOUR, instead(KeysAsValues, "_rank", 0)),
    "layers without their scale": ("gemma4", ONE, instead(ScaledSum, "forward", unscaled)),
    "a scale before the sum": ("gemma4", ONE, instead(ScaledSum, "forward", scaled_before)),
    "a partial rope": ("gemma4", ONE, instead(Rope, "_is_proportional", False)),
    "divided scores": ("gemma4", ONE, in_gemma4("softmax_scale", None)),
    "norms around zero": ("gemma4", ONE, in_gemma4("layernorm_zero_centered_gamma", True)),
    "uncapped logits": ("gemma4", ONE, {"final_logit_softcapping": None}),
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
