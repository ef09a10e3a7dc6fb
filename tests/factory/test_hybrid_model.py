"""``model="hybrid"`` has the bits of ``model="gpt"``: losses, gradients, steps, exports and initial values."""

import copy
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from mcore_bridge import ParallelDims, build_model, forward, load_hf_weights, manifest, save_hf_checkpoint
from mcore_bridge.errors import ConfigError, MappingError
from mcore_bridge.factory.blueprint import BuildOptions, make_blueprint, reconcile
from mcore_bridge.factory.hybrid_model import pattern_of
from mcore_bridge.factory.hybrid_support import RELEASE, require_hybrid
from mcore_bridge.launch.fake_rank import rank_of
from mcore_bridge.rules.names import Numbering, canonical
from mcore_bridge.weights.model_tensors import held_tensors
from tests import zoo
from tests.support import mtp_checkpoints, pool, stepping, tiny
from tests.support.strategies import save

CASES = {
    name: zoo.cases()[name].hf
    for name in zoo.here(
        (
            *("qwen3_moe", "qwen3", "nemotron_h", "granitemoehybrid", "seed_oss", "deepseek_v3"),
            *("qwen3_next-dense", "granite", "gemma"),
        )
    )
}
PAGE = Path(__file__).parents[2] / "docs" / "guide" / "hybrid_model.md"
needs_it = pytest.mark.skipif(not RELEASE.is_installed, reason="the installed megatron-core has no HybridModel")
MESHES = {
    1: [{}],
    2: [
        {"tp": 2, "sp": True},
        {"pp": 2, "num_layers_in_first_pipeline_stage": 1},
        {"ep": 2},
        {"cp": 2},
    ],
    4: [
        {"tp": 2, "sp": True, "pp": 2, "vp": 2},
        {"tp": 2, "etp": 1, "ep": 2, "sp": True, "pp": 2, "layout": "Et|tttL"},
    ],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: str(tiny.random_checkpoint(hf, tmp_path_factory.mktemp("hybrid"))) for name, hf in CASES.items()}


def seed(chunk, index):
    """Seed dropout, so that both classes drop equal elements."""
    torch.manual_seed(5)
    model_parallel_cuda_manual_seed(7, force_reset_rng=True)


def steps(folders, meshes):
    """Runs in each worker: for each mesh and case, the differences between a step of the two classes."""
    differing = []
    batch, build = tiny.tokens(2, vocab_size=64), {"lr": 0.5, "on_chunk": seed}
    for number, sizes in enumerate(meshes):
        dims = ParallelDims(**sizes)
        some = [name for name in ("qwen3_moe", "nemotron_h", "seed_oss", "qwen3") if name in folders]  # one has dropout
        some = [name for name in some if dims.ep == 1 or name in ("qwen3_moe", "nemotron_h")]
        with stepping.mesh(dims):
            for name in folders if sizes == {} else some[: 2 if number else 4]:
                both = (stepping.train(folders[name], dims, batch, model=each, **build) for each in ("gpt", "hybrid"))
                differing += [f"{name} on {sizes}: {part}" for part in unequal(*both)]
    return differing


def unequal(one, other):
    """The differences between two steps."""
    assert (one["loss"] is None) == (other["loss"] is None)
    if one["loss"] is not None and not torch.equal(one["loss"], other["loss"]):
        yield "loss"
    for part in ("grads", "weights"):
        assert [*one[part]] == [*other[part]]
        yield from (f"{part} of {each}" for each in one[part] if not torch.equal(one[part][each], other[part][each]))


@needs_it
@pytest.mark.parametrize("world_size", MESHES)
def test_every_mesh_trains_bit_for_bit_as_the_other_class_does(folders, world_size):
    assert pool.run(world_size, steps, folders, MESHES[world_size]) == [[]] * world_size


def surfaces(folder, target):
    """Runs in each worker: loads, saves, freezes and computes with each class, and returns the results."""
    dims, found = ParallelDims(tp=2, sp=True), []
    with stepping.mesh(dims):
        for model in ("gpt", "hybrid"):
            build = {"dims": dims, "dtype": torch.float32, "device": "cpu", "model": model}
            drawn = build_model(folder, **build, load_weights=False, seed=3, freeze=["*.1.mlp.*"])
            values = {name: tensor.clone() for name, tensor in held_tensors(drawn).items()}
            frozen = {name for name, held in held_tensors(drawn).items() if not held.requires_grad}
            load_hf_weights(drawn, folder)
            save_hf_checkpoint(drawn, f"{target}/{model}")
            losing = {"moe_aux_loss_coeff": 0.5, "moe_router_load_balancing_type": "aux_loss"}
            again = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
            models = build_model(f"{target}/{model}", **build, overrides=losing | again)
            mask = torch.tensor([[1] * 7 + [0] * 9, [1] * 16])
            ids = tiny.tokens(2)[:, :16]
            out = forward(models, ids, mask, loss=lambda outputs, rows: outputs.log_probs.mean(), packed=False)
            grads = {name: p.grad for name, p in held_tensors(models).items() if p.grad is not None}
            digests = manifest(models, digests=True)
            found.append((type(models[0]).__name__, values, frozen, out.log_probs, grads, digests))
    return found


@needs_it
def test_both_classes_have_one_surface(folders, tmp_path):
    """Initial values from one seed, frozen names, saved folders, log-probs, and router losses of rows with padding."""
    for one, other in pool.run(2, surfaces, folders["qwen3_moe"], str(tmp_path)):
        assert (one[0], other[0]) == ("GPTModel", "HybridModel")
        assert other[2] == one[2] != set()
        assert torch.equal(one[3], other[3])
        assert one[5] == other[5]
        for mine, theirs in ((one[1], other[1]), (one[4], other[4])):
            assert [*mine] == [*theirs]
            assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@needs_it
def test_each_half_of_a_layer_has_the_number_of_the_layer():
    dims = ParallelDims(pp=2, num_layers_in_first_pipeline_stage=1)
    build = {"dims": dims, "device": "meta", "load_weights": False, "model": "hybrid"}
    with rank_of(dims, 1, 2):
        (chunk,), other = (build_model(CASES["qwen3"], **build) for _ in range(2))
    assert [layer.layer_number for layer in chunk.decoder.layers] == [2, 2, 3, 3, 4, 4]
    assert chunk.config.num_layers_in_first_pipeline_stage == 1
    assert chunk.decoder.final_layernorm is chunk.decoder.final_norm
    with pytest.raises(MappingError, match="in two of the 2 chunks"):
        held_tensors([chunk, *other])
    changed = make_blueprint(CASES["qwen3"], BuildOptions(dims=ParallelDims(), dtype=torch.float32, model="hybrid"))
    changed.config.attention_dropout = 0.25
    assert reconcile(changed).options.model == "hybrid"
    assert canonical("decoder.final_norm.weight", Numbering(())) == "decoder.final_layernorm.weight"


def test_a_pattern_has_the_halves_of_all_layers_by_stage():
    """The pattern follows from a config, so this runs without a release that has the class."""
    sparse = copy.deepcopy(zoo.cases()["deepseek_v3"].hf)
    sparse.num_nextn_predict_layers = 2
    options = BuildOptions(dims=ParallelDims(pp=2, vp=2), dtype=torch.bfloat16)
    for hf, predictions, expected in (
        (CASES["qwen3"], 0, "*-|*-|*-|*-"),
        (sparse, 0, "+-|+E|+E|+E"),
        (sparse, 2, "+-|+E|+E|+E/+E/+E"),
    ):
        blueprint = make_blueprint(hf, replace(options, overrides={"mtp_num_layers": predictions or None}))
        require_hybrid(blueprint.architecture, blueprint.config, positions="rope", vision="text_only")
        assert pattern_of(blueprint) == expected


REASONS = {
    "qwen3-bias-window": ({}, r"differ in windows"),
    "smollm3": ({}, "differ in ropes"),
    "cohere2": (
        {},
        r"MLP and attention read the same input.*; its attention layers differ in ropes, windows, .* Use model=\"gpt\"",
    ),
    "deepseek_v3": (
        {"mla_down_proj_fusion": True, "mtp_num_layers": 1},
        "MTP layers only in the stage of the loss.*; HybridModel exchanges modules for mla_down_proj_fusion",
    ),
}


@needs_it
@pytest.mark.parametrize("name", REASONS)
def test_refused(name):
    overrides, reason = REASONS[name]
    hf, dims = zoo.cases()[name].hf, ParallelDims()
    if "mtp_num_layers" in overrides:
        hf.num_nextn_predict_layers, dims = 1, ParallelDims(pp=3, layout="Ettt|tm|L")
    with pytest.raises(ConfigError, match=reason):
        make_blueprint(hf, BuildOptions(dims=dims, dtype=torch.float32, model="hybrid", overrides=overrides))


@needs_it
def test_the_page_says_which_families_are_refused():
    refused, known = set(), set()
    for each in zoo.cases().values():
        gpt = make_blueprint(each.hf, BuildOptions(dims=ParallelDims(), dtype=torch.float32))
        known.add(family := gpt.architecture.model_type)
        try:
            require_hybrid(gpt.architecture, gpt.config, positions="rope", vision="text_only")
        except ConfigError:
            refused.add(family)
    named = set(re.findall("`([a-z0-9_]+)`", PAGE.read_text().split("## Families")[1]))
    assert refused == named & known != set()


def test_only_known_classes_of_a_release_that_has_them():
    build = {"dims": ParallelDims(), "dtype": torch.float32}
    with pytest.raises(ConfigError, match="model must be one of gpt, hybrid, found 'mamba'"):
        make_blueprint(CASES["qwen3"], BuildOptions(**build, model="mamba"))
    if not RELEASE.is_installed:
        with pytest.raises(ConfigError, match=r"model=\"hybrid\" needs megatron-core 0\.19 or later, found 0\.16"):
            make_blueprint(CASES["qwen3"], BuildOptions(**build, model="hybrid"))


MTP = {"qwen3_next": 1, "deepseek_v3": 1, "nemotron_h-narrow-experts": 2}
"""Cases, each with the number of MTP layers that predict two tokens. A single layer is repeated."""
MTP_MESHES = [{"tp": 2, "sp": True, "ep": 2, "etp": 1}, {"pp": 2, "layout": "Etttt|mmL"}]


def mtp_steps(folders, meshes):
    """Runs in each worker: differences between the classes in a step with MTP layers, for all cases on one mesh."""
    differing = []
    for number, sizes in enumerate(meshes):
        for name, held in [*folders][number:]:
            losing = {"moe_aux_loss_coeff": 0.5, "moe_router_load_balancing_type": "aux_loss"}
            overrides = {"mtp_num_layers": 2, "mtp_use_repeated_layer": held == 1, **losing}
            dims, batch = ParallelDims(**sizes), tiny.tokens(4, vocab_size=64)
            with stepping.mesh(dims):
                build = {"lr": 0.5, "on_chunk": seed, "overrides": overrides}
                one, other = (
                    stepping.train(folders[name, held], dims, batch, model=model, **build)
                    for model in ("gpt", "hybrid")
                )
            assert one["grads"].keys() == other["grads"].keys()  # another stage has the final norm on the second mesh
            wrong = (each for each in one["grads"] if not torch.equal(one["grads"][each], other["grads"][each]))
            differing += [f"{name} on {sizes}: {each}" for each in wrong]
            if one["loss"] is not None and not torch.equal(one["loss"], other["loss"]):
                differing.append(f"{name} on {sizes}: loss")
    return differing


@needs_it
def test_mtp_layers_train_bit_for_bit_as_in_the_other_class(tmp_path):
    folders = {}
    for name, held in ((name, held) for name, held in MTP.items() if zoo.here([name])):
        hf = mtp_checkpoints.config(name, held)
        folders[name, held] = str(tmp_path / name)
        (tmp_path / name).mkdir()
        save(mtp_checkpoints.published(hf, held), hf, folders[name, held])
    assert pool.run(2, mtp_steps, folders, MTP_MESHES) == [[], []]
