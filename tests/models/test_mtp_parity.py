"""An MTP layer predicts what transformers' modules compute from the published tensors."""

import functools
from contextlib import nullcontext
from dataclasses import replace
from operator import itemgetter

import pytest
import torch
import torch.distributed as dist

import mcore_bridge as mb
from mcore_bridge.factory.modules import streams
from mcore_bridge.factory.mtp_specs import REPEATED
from mcore_bridge.rules.layout import Rearrange
from tests.support import mtp_checkpoints, pool, stepping, tiny
from tests.support.bounds import BOUND
from tests.support.mtp_steps import reference_step
from tests.support.mutants import instead, laid_out, mutated, of
from tests.support.strategies import save

_joined = streams.StreamsMtpLayer._concat_embeddings


def shifted(self, hidden_states, decoder_input):
    """The merged hidden state takes the place of the first stream."""
    return _joined(self, hidden_states.roll(self.config.hidden_size, -1), decoder_input)


def first_stream(mtp, inputs, output):
    return output[..., : mtp.config.hidden_size]


def dealt_out(projection):
    mistake = of(f".{projection}.weight", laid_out(Rearrange("(n tp) ...", "tp n ...")))
    return functools.partial(mutated, mistake)


PLANTED = {
    "a merged stream": instead(streams.StreamsMtpLayer, "_concat_embeddings", shifted),
    "no merge": instead(streams, "_without_streams", first_stream),
    "rows of the embedding": dealt_out("e_proj"),
    "rows of streams": dealt_out("h_proj"),
}
"""Mistakes in modules of MTP layers that read streams, and in layouts of their projections."""


def worst_of(names, dims, references, mistake=lambda state: state, planted=""):
    """Runs in each worker: the largest difference of each case, relative to the spread of the reference."""
    worst = {}
    for name in names:
        hf = mtp_checkpoints.config(name)
        with stepping.mesh(dims), PLANTED.get(planted, nullcontext)():
            (model,) = mb.build_model(
                hf,
                dims=dims,
                dtype=torch.float32,
                device="cpu",
                load_weights=mistake(mtp_checkpoints.published(hf)),
                overrides={"mtp_num_layers": 1},
            )
            logits = mtp_checkpoints.predicted(model.eval(), hf)
            parts = [torch.empty_like(logits) for _ in range(dims.tp)]
            dist.all_gather(parts, logits.contiguous(), group=model.pg_collection.tp)
        reference = references[name]
        difference = torch.cat(parts, -1)[..., : hf.vocab_size] - reference
        worst[name] = float(difference.abs().max() / reference.std())
    return worst


@pytest.fixture(scope="module")
def references():
    names = mtp_checkpoints.CASES
    return {name: mtp_checkpoints.reference_logits(mtp_checkpoints.config(name)) for name in names}


@pytest.mark.parametrize("dims", [mb.ParallelDims(), mb.ParallelDims(tp=2, sp=True)], ids=str)
def test_predictions_are_those_of_transformers_modules(references, dims):
    for worst in pool.run(dims.tp, worst_of, mtp_checkpoints.CASES, dims, references):
        assert all(difference < BOUND for difference in worst.values()), worst


def norms_exchanged(state):
    return {**state, "mtp.pre_fc_norm_hidden.weight": state["mtp.pre_fc_norm_embedding.weight"]}


def halves_exchanged(state):
    return {**state, "mtp.fc.weight": state["mtp.fc.weight"].roll(state["mtp.fc.weight"].shape[0], 1)}


PAIRS = (
    ("mtp.layers.0.norm.weight", "mtp.layers.1.norm.weight"),
    ("mtp.layers.0.enorm.weight", "mtp.layers.0.hnorm.weight"),
    ("mtp.layers.1.norm.weight", "mtp.layers.1.final_layernorm.weight"),
)


def exchanged(state, one, other):
    return {**state, one: state[other], other: state[one]}


def columns_exchanged(state):
    name = "model.mtp_layers.0.input_proj.weight"
    return {**state, name: state[name].roll(state[name].shape[1] // 2, 1)}


MISTAKES = [("qwen3_next", norms_exchanged), ("qwen3_next", halves_exchanged), ("mimo", columns_exchanged)]
MISTAKES += [("nemotron_h", functools.partial(exchanged, one=one, other=other)) for one, other in PAIRS]
PAIRS_OF_STREAMS = (
    ("mtp.0.e_proj.weight", "mtp.0.h_proj.weight"),
    ("mtp.0.enorm.weight", "mtp.0.hnorm.weight"),
    ("mtp.0.norm.weight", "norm.weight"),
    ("mtp.0.hc_head_base", "hc_head_base"),
    ("mtp.0.hc_attn_base", "mtp.0.hc_ffn_base"),
)
MISTAKES += [("deepseek_v4", functools.partial(exchanged, one=one, other=other)) for one, other in PAIRS_OF_STREAMS]


@pytest.mark.parametrize(("name", "mistake"), mtp_checkpoints.params(MISTAKES, itemgetter(0)))
def test_parity_can_fail(references, name, mistake):
    (worst,) = pool.run(1, worst_of, [name], mb.ParallelDims(), references, mistake)
    assert worst[name] > 50 * BOUND


@pytest.mark.parametrize(
    ("name", "planted"), mtp_checkpoints.params([("deepseek_v4", each) for each in PLANTED], itemgetter(0))
)
def test_mistakes_in_modules_and_layouts_show(references, name, planted):
    for worst in pool.run(2, worst_of, [name], mb.ParallelDims(tp=2, sp=True), references, dict, planted):
        assert worst[name] > 50 * BOUND


@pytest.mark.skipif("exaone4" not in mtp_checkpoints.CASES, reason="the installed transformers lacks it")
def test_a_window_and_a_rope_of_the_last_layer_show(references, monkeypatch):
    style = mtp_checkpoints.STYLES["exaone"]
    monkeypatch.setitem(mtp_checkpoints.STYLES, "exaone", replace(style, like_first=False))
    other, right = mtp_checkpoints.reference_logits(mtp_checkpoints.config("exaone4")), references["exaone4"]
    assert (other - right).abs().max() / right.std() > 50 * BOUND


STEPS = {1: [{}], 2: [{"tp": 2, "sp": True}, {"pp": 2}, {"ep": 2}, {"pp": 2, "layout": "Etttt|mL"}, {"cp": 2}]}
RANKS = {"{'cp': 2}": [[*range(4), *range(12, 16)], [*range(4, 12)]]}
HALVES = mtp_checkpoints.HALVES[1]
SCALE = 0.3
UNTRAINED = ("e_score_correction_bias", "ffn.gate.bias", "ffn.gate.tid2eid")


def steps(folder, meshes, overrides):
    """Runs in each worker: a step on each mesh."""
    found = []
    for sizes in meshes:
        layout = sizes.get("layout", "").replace("m", "m" * overrides["mtp_num_layers"])
        dims = mb.ParallelDims(**{**sizes, "layout": layout or None})
        with stepping.mesh(dims):
            found.append((str(sizes), "", stepping.train(folder, dims, tiny.tokens(4), overrides=overrides)))
    return found


ASKED = [(HALVES, 2, False), (HALVES, 2, True), ("exaone_moe", 1, False), ("deepseek_v4", 2, False)]


@pytest.mark.parametrize(("name", "depths", "repeated"), mtp_checkpoints.params(ASKED, itemgetter(0)))
def test_a_step_has_the_loss_of_tokens_ahead(tmp_path, name, depths, repeated):
    if repeated and not REPEATED.is_installed:
        pytest.skip("the installed megatron-core repeats no layer")
    held = 1 if repeated else depths
    hf = mtp_checkpoints.config(name, held)
    asked = {"depths": depths, "repeated": repeated, "scale": SCALE}
    references = {
        label: reference_step(hf, tiny.tokens(4), **asked, ranks=RANKS.get(label, ())) for label in ("", *RANKS)
    }
    save(mtp_checkpoints.published(hf, held), hf, tmp_path)
    overrides = {"mtp_num_layers": depths, "mtp_loss_scaling_factor": SCALE}
    overrides |= {"mtp_use_repeated_layer": True} if repeated else {}
    for world_size, meshes in STEPS.items():
        for results in zip(*pool.run(world_size, steps, str(tmp_path), meshes, overrides), strict=True):
            loss, grads = references[results[0][0] if results[0][0] in RANKS else ""]
            tiny.assert_losses(results, loss)
            for label, _, step in results:
                untrained = {name for name in step["grads"] if name.endswith(UNTRAINED) or ".indexer." in name}
                assert step["grads"].keys() - untrained == grads.keys(), label
                tiny.assert_near(step["grads"], grads, label)
