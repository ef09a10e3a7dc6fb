"""Planted mistakes in latent attention: in rules, norms, the scale, and code that affects only gradients."""

import contextlib
import tempfile
from unittest import mock

import pytest

from mcore_bridge import ParallelDims
from mcore_bridge.config.rope import Rope
from mcore_bridge.factory.modules.latent_modules import LatentAttention, LatentNorm
from mcore_bridge.factory.modules.rotary import LatentRotaryEmbedding
from mcore_bridge.rules.layout import COLUMN, REPLICATED, Rearrange
from tests import zoo
from tests.support import mutants, pool, stepping, tiny
from tests.support.bounds import BOUND, ONE
from tests.support.latent_mistakes import with_epsilon_of_mcore
from tests.support.mutants import DEALT_ROW, exchange, laid_out, of
from tests.support.parity import reference_logits, worst_differences
from tests.zoo.latent import DENSE, latent

HF = latent("deepseek_v3", **DENSE, num_hidden_layers=2, q_lora_rank=20).hf
YARN = zoo.cases()["deepseek_v3-yarn"].hf

DEALT = Rearrange("(n tp) ...", "tp n ...")
# fmt: off
RULES = {
    "q norm for kv norm":       ("logits",         exchange("q_layernorm.weight", "kv_layernorm.weight")),
    "k and v up dealt out":     ("logits at tp=2", of("kv_up_proj.weight", laid_out(DEALT))),
    "o_proj dealt out":         ("logits at tp=2", of("linear_proj.weight", laid_out(DEALT_ROW))),
    "down projection cut":      ("shapes at tp=2", of("kv_down_proj.weight", laid_out(COLUMN))),
    "up projection replicated": ("shapes at tp=2", of("q_up_proj.weight", laid_out(REPLICATED))),
}
# fmt: on


def fates(tp, names, reference):
    with mock.patch.dict(mutants.MUTANTS, RULES):
        return [mutants.fate(name, HF, tp, reference) for name in names]


@pytest.fixture(scope="module")
def found():
    reference = reference_logits(HF)
    return {tp: dict(zip(RULES, pool.run(tp, fates, tp, list(RULES), reference)[0], strict=True)) for tp in (1, 2)}


@pytest.mark.parametrize("name", RULES)
def test_killed_rule(found, name):
    tier, _, tp = RULES[name][0].partition(" at tp=")
    fate = found[2][name]
    assert fate == "logits" if tier == "logits" else "does not fit" in fate or "has shape" in fate
    if tp:
        assert found[1][name] == "survives"


def without_attention_factor(self, *arguments, **keywords):
    return super(LatentRotaryEmbedding, self).forward(*arguments, **keywords), 1.0


def plain_scale(self):
    return {**TO_LATENT(self), "mscale_all_dim": 0.0}


def unsummed(self, linear, inputs, outputs):
    return outputs


TO_LATENT = Rope.to_latent
MISTAKES = {
    "epsilon": lambda: mock.patch.object(LatentNorm, "__init__", with_epsilon_of_mcore),
    "attention factor": lambda: mock.patch.object(LatentRotaryEmbedding, "forward", without_attention_factor),
    "softmax scale": lambda: mock.patch.object(Rope, "to_latent", plain_scale),
    "none": contextlib.nullcontext,
}


def mistaken(names, reference):
    found = {}
    for name in names:
        with MISTAKES[name]():
            (found[name],) = worst_differences([(YARN, ONE, reference)])
    return found


def test_killed_modules():
    (found,) = pool.run(1, mistaken, list(MISTAKES), reference_logits(YARN))
    assert found.pop("none") < BOUND
    assert all(difference > 50 * BOUND for difference in found.values()), found


def trained_unsummed(folder):
    with (
        mock.patch.object(LatentAttention, "_sum_gradient_of_rotated", unsummed),
        stepping.mesh(ParallelDims(tp=2)),
    ):
        return stepping.train(folder, ParallelDims(tp=2), tiny.tokens(2))["grads"]


def test_killed_gradients_of_the_rotated_keys_not_summed():
    with tempfile.TemporaryDirectory() as folder:
        model = tiny.random_model(HF)
        model.save_pretrained(folder)
        (grads, _) = pool.run(2, trained_unsummed, folder)
    name = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
    assert tiny.relative_error(grads[name], tiny.reference(model, tiny.tokens(2))[2][name]) > 1e-2
