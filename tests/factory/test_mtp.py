"""MTP layers: built or not, in the file or not, in the last stage or a separate stage. Each tensor has one owner."""

from dataclasses import replace
from operator import itemgetter

import pytest
import torch

import mcore_bridge as mb
from mcore_bridge import ParallelDims
from mcore_bridge.errors import CheckpointError, ConfigError, MeshError
from mcore_bridge.factory.blueprint import BuildOptions, make_blueprint
from mcore_bridge.factory.mtp_specs import REPEATED
from mcore_bridge.weights.load import load_hf_weights
from tests import zoo
from tests.support import fake_mesh, mtp_checkpoints, pool, stepping
from tests.support.mtp import goes_round, published
from tests.support.strategies import save
from tests.support.tiny import relative_error, tokens

LAYERS = 4
MESHES = [
    ParallelDims(),
    ParallelDims(tp=2, sp=True),
    ParallelDims(pp=2),
    ParallelDims(pp=2, vp=2),
    ParallelDims(tp=2, ep=2, sp=True, pp=2),
    ParallelDims(pp=2, layout="balanced"),
    ParallelDims(ep=2, etp=2),
]


NUMBERS = [("glm4_moe", 1), ("glm4_moe", 2), ("qwen3_next", 1), ("nemotron_h-narrow-experts", 2), ("hy_v3", 1)]
NUMBERS += [("mimo", 2), ("exaone_moe", 1), ("exaone4", 1), ("deepseek_v4", 2)]


@pytest.mark.parametrize(("name", "num_mtp_layers"), mtp_checkpoints.params(NUMBERS, itemgetter(0)))
@pytest.mark.parametrize("dims", MESHES, ids=str)
def test_they_go_round(dims, name, num_mtp_layers):
    dims = replace(dims, ep=1, etp=1) if name in ("mimo", "exaone4") else dims  # which have no experts
    goes_round(*published(num_mtp_layers, name), dims, num_mtp_layers)


@pytest.mark.parametrize("layout", ["Ettt|tmL", "Etttt|mL", "Ett|tt|m|L", "Ettt|t|m|L"])
def test_they_go_round_in_a_stage_of_their_own(layout):
    goes_round(*published(1), ParallelDims(pp=layout.count("|") + 1, layout=layout), 1)


@pytest.mark.parametrize("name", mtp_checkpoints.params(mtp_checkpoints.ALL))
@pytest.mark.parametrize("dims", MESHES[2:3], ids=str)
def test_in_the_file_and_not_built_they_are_ignored_and_reported(dims, name):
    hf, state = published(1, name)
    reports = []
    held = fake_mesh.build_everywhere(
        hf, dims, lambda chunks: reports.append(load_hf_weights(chunks, state)), dtype=torch.float32
    )
    extra = {name for name in state if mtp_checkpoints.is_mtp(hf, name)}
    assert all(set(report.ignored) == extra for report in reports)
    assert fake_mesh.export(held).keys() == state.keys() - extra


def test_layers_beyond_those_that_the_config_has_are_unexpected():
    hf, state = published(1)
    more = {**state, f"model.layers.{LAYERS + 1}.enorm.weight": torch.ones(hf.hidden_size)}
    with pytest.raises(CheckpointError, match=r"unexpected.*layers.5.enorm"):
        fake_mesh.build_everywhere(hf, ParallelDims(), lambda c: load_hf_weights(c, more), dtype=torch.float32)


def test_a_part_of_a_layer_is_missing():
    hf, state = published(1)
    state.pop(f"model.layers.{LAYERS}.eh_proj.weight")
    with pytest.raises(CheckpointError, match=r"missing.*layers.4.eh_proj"):
        goes_round(hf, state, ParallelDims(), 1)


def drawn(hf, state, sizes):
    """Run in each worker: the initial values of an MTP layer that the file lacks, and the report of the load."""
    dims = ParallelDims(**sizes)
    with stepping.mesh(dims):
        models = mb.build_model(
            hf, dims=dims, dtype=torch.float32, device="cpu", load_weights=state, overrides={"mtp_num_layers": 1}
        )
        report = load_hf_weights(models, state)
        return report.initialised, mb.to_hf_state_dict(models)


@pytest.mark.parametrize("sizes", [{"tp": 2, "sp": True}, {"pp": 2}, {"ep": 2}], ids=str)
def test_built_and_not_in_the_file_they_are_drawn_and_reported(sizes):
    hf, state = published(1)
    plain = {name: tensor for name, tensor in state.items() if not name.startswith(f"model.layers.{LAYERS}.")}
    results = pool.run(2, drawn, hf, plain, sizes)
    named = {name for initialised, _ in results for name in initialised}
    copies = {f"model.layers.{LAYERS}.embed_tokens.weight", f"model.layers.{LAYERS}.shared_head.head.weight"}
    assert named == state.keys() - plain.keys() - copies
    for _, exported in results:
        assert exported.keys() == state.keys()
        for name in named:
            assert torch.equal(exported[name], results[0][1][name])
            if "norm" not in name and "bias" not in name:
                assert 0.01 < exported[name].std() < 0.03, name


@pytest.mark.parametrize(("name", "count"), [("qwen3_moe", 1), ("glm4_moe", 2), ("qwen3_next", 2)])
def test_more_than_have_names_are_refused(name, count):
    hf = mtp_checkpoints.config(name) if count > 1 else zoo.cases()[name].hf
    with pytest.raises(ConfigError, match=rf"mtp_num_layers must be at most {count - 1}, found {count}"):
        make_blueprint(hf, BuildOptions(dims=ParallelDims(), dtype=torch.float32, overrides={"mtp_num_layers": count}))


@pytest.mark.parametrize("wanted", ["1", 1.0, True, -1])
def test_a_number_that_is_none_is_refused(wanted):
    with pytest.raises(ConfigError, match="mtp_num_layers must be a whole number of at least 0, or None"):
        make_blueprint(
            zoo.cases()["llama"].hf,
            BuildOptions(dims=ParallelDims(), dtype=torch.float32, overrides={"mtp_num_layers": wanted}),
        )


@pytest.mark.parametrize("name", zoo.params(("glm4_moe", "deepseek_v3")))
def test_like_a_layer_without_experts_they_are_refused_where_files_have_some(name):
    """Every rank raises, although only the last stage builds MTP layers."""
    asked = {"dims": ParallelDims(pp=2, layout="E|tmL"), "dtype": torch.float32}
    overrides = {"mtp_num_layers": 1, "num_layers": 1}
    with pytest.raises(ConfigError, match=r"like the last layer, which has no experts here.*keep more layers"):
        make_blueprint(mtp_checkpoints.config(name), BuildOptions(**asked, overrides=overrides))


def test_like_a_layer_that_attends_linearly_they_are_refused():
    hf = zoo.cases()["qwen3_next"].hf
    hf.layer_types = ["full_attention", *["linear_attention"] * 3]
    with pytest.raises(MeshError, match="has linear attention"):
        make_blueprint(hf, BuildOptions(dims=ParallelDims(), dtype=torch.float32, overrides={"mtp_num_layers": 1}))


FLAT = mtp_checkpoints.HALVES[0]
with_halves = pytest.mark.skipif(FLAT not in mtp_checkpoints.CASES, reason="the installed transformers lacks it")
KINDS = {
    "found 'ME'": {"mtp_layers_block_type": ["linear_attention", "moe"]},
    r"found '\*E\*E'": {"mtp_layers_block_type": ["full_attention", "moe"] * 2},
    "no layer of the decoder has any": {"layers_block_type": ["full_attention", "mlp"]},
}


@with_halves
@pytest.mark.parametrize("reason", KINDS)
def test_of_kinds_that_nobody_has_they_are_refused(reason):
    hf = mtp_checkpoints.config(FLAT)
    for name, kinds in KINDS[reason].items():
        setattr(hf, name, kinds)
    asked = {"dims": ParallelDims(), "dtype": torch.float32}
    make_blueprint(hf, BuildOptions(**asked))
    with pytest.raises(ConfigError, match=reason):
        make_blueprint(hf, BuildOptions(**asked, overrides={"mtp_num_layers": 1}))


@with_halves
def test_halves_are_numbered_through():
    names = mb.mapping(mtp_checkpoints.config(FLAT, 2))
    assert names.consumers("mtp.layers.3.mixer.gate.weight") == ("mtp.layers.1.transformer_layer.mlp.router.weight",)
    assert names.consumers("mtp.layers.2.norm.weight") == ("mtp.layers.1.transformer_layer.input_layernorm.weight",)
    assert names.bind("mtp.layers.1.final_layernorm.weight").hf == ("mtp.layers.3.final_layernorm.weight",)
    assert names.consumers("mtp.layers.4.norm.weight") == ()


def test_one_layer_is_repeated_if_the_release_can():
    asked = {"dims": ParallelDims(), "dtype": torch.float32}
    overrides = {"mtp_num_layers": 2, "mtp_use_repeated_layer": True}
    if not REPEATED.is_installed:
        with pytest.raises(ConfigError, match=r"mtp_use_repeated_layer needs megatron-core 0\.19 or later"):
            make_blueprint(mtp_checkpoints.config("glm4_moe"), BuildOptions(**asked, overrides=overrides))
        return
    held = make_blueprint(mtp_checkpoints.config("glm4_moe"), BuildOptions(**asked, overrides=overrides))
    assert len(held.mtp_block_spec(held.stages[-1]).layer_specs) == 1
    with pytest.raises(
        ConfigError, match=r"mtp_hybrid_override_pattern must be '\*E', as the HF config says, found 'M'"
    ):
        make_blueprint(
            mtp_checkpoints.config("glm4_moe"), BuildOptions(**asked, overrides={"mtp_hybrid_override_pattern": "M"})
        )
    with pytest.raises(ConfigError, match="or repeat one layer by mtp_use_repeated_layer"):
        make_blueprint(mtp_checkpoints.config("glm4_moe"), BuildOptions(**asked, overrides={"mtp_num_layers": 2}))


def trained(folder, meshes):
    """Run in each worker: the gradients of a step on each mesh; its loss includes the MTP loss."""
    found = []
    for sizes in meshes:
        dims = ParallelDims(**sizes)
        with stepping.mesh(dims):
            batch = tokens(8, seq_len=16, vocab_size=96)
            found.append(stepping.train(folder, dims, batch, micro_batch_size=4, overrides={"mtp_num_layers": 1}))
    return found


PROJECTIONS = {
    "glm4_moe": (f"model.layers.{LAYERS}.eh_proj.weight", [{"tp": 2, "sp": True, "ep": 2}, {"pp": 2}, {"ep": 2}]),
    "mimo": ("model.mtp_layers.0.input_proj.weight", [{"tp": 2, "sp": True}]),
}


@pytest.mark.parametrize("name", PROJECTIONS)
def test_their_gradients_do_not_depend_on_the_mesh(tmp_path, name):
    hf, state = published(1, name)
    save(state, hf, tmp_path)
    ((expected,),) = pool.run(1, trained, str(tmp_path), [{}])
    projection, meshes = PROJECTIONS[name]
    assert expected["grads"][projection].any()
    meshes = [*meshes, {"pp": 2, "layout": "Etttt|mL"}]
    for steps in pool.run(2, trained, str(tmp_path), meshes):
        for sizes, step in zip(meshes, steps, strict=True):
            errors = {name: relative_error(step["grads"][name], grad) for name, grad in expected["grads"].items()}
            assert max(errors.values()) < 1e-4, (sizes, errors)
