"""Checkpoints of a ``HybridModel`` and of a ``GPTModel``: each reads the other's, with the state of the optimizer."""

import contextlib

import pytest
import torch

import mcore_bridge as mb
from mcore_bridge import ParallelDims
from mcore_bridge.architecture import read_hf
from mcore_bridge.convert.convert import convert
from mcore_bridge.errors import ConfigError, MappingError
from mcore_bridge.factory.add_adapters import add_adapters
from mcore_bridge.factory.hybrid_support import RELEASE
from mcore_bridge.launch.fake_rank import rank_of
from mcore_bridge.rules.hybrid_keys import HalfKeys
from mcore_bridge.rules.names import Numbering, canonical, plain_key
from mcore_bridge.weights.bound import bind, provenance_on
from mcore_bridge.weights.dist_checkpoint.compare import leaves_of, sharded_states
from mcore_bridge.weights.dist_checkpoint.fit_state import respell
from mcore_bridge.weights.dist_checkpoint.folder import CONTENT, TorchDistFolder
from mcore_bridge.weights.files.hf_folder import Checkpoint
from mcore_bridge.weights.model_tensors import held_tensors
from mcore_bridge.weights.peft.hf_adapters import iter_hf_adapters
from tests import zoo
from tests.support import mtp_checkpoints, pool, stepping, tiny
from tests.support.hybrid_models import built_elsewhere
from tests.support.strategies import save
from tests.support.written_weights import read

needs_it = pytest.mark.skipif(not RELEASE.is_installed, reason="the installed megatron-core has no HybridModel")
KEYED = ("qwen3_moe", "nemotron_h-no-experts", "granitemoehybrid")
NAMES = zoo.params(("qwen3_moe", "nemotron_h"))
KEYS = [
    ("layers.0.input_layernorm.weight", "layers.0.input_layernorm.weight"),
    ("layers.0.mlp.linear_fc1.layer_norm_weight", "layers.1.mlp.linear_fc1.layer_norm_weight"),
    ("layers.1.self_attention.in_proj.layer_norm_weight", "layers.2.mixer.in_proj.layer_norm_weight"),
    ("layers.1.input_layernorm.weight", "layers.2.norm.weight"),
    ("layers.2.pre_mlp_layernorm.weight", "layers.3.pre_mlp_layernorm.weight"),
    ("layers.3.self_attention.in_proj.weight", "layers.4.self_attention.in_proj.weight"),
    ("layers.3.mlp.router.weight", "layers.5.mlp.router.weight"),
    ("final_layernorm.weight", "final_norm.weight"),
]


@pytest.mark.parametrize(("gpt", "hybrid"), KEYS)
def test_keys_of_halves(gpt, hybrid):
    keys = HalfKeys(("*-", "M", "E", "GE"))
    assert keys.to_hybrid(gpt) == hybrid
    assert keys.to_gpt(hybrid) == gpt


MTP_KEYS = [
    (
        "mtp.layers.1.transformer_layer.input_layernorm.weight",
        "mtp.layers.1.mtp_model_layer.layers.0.input_layernorm.weight",
    ),
    ("mtp.layers.1.transformer_layer.mlp.router.weight", "mtp.layers.1.mtp_model_layer.layers.1.mlp.router.weight"),
    ("mtp.layers.1.eh_proj.weight", "mtp.layers.1.eh_proj.weight"),
]


@pytest.mark.parametrize(("gpt", "hybrid"), MTP_KEYS)
def test_keys_of_halves_within_mtp_layers(gpt, hybrid):
    keys = HalfKeys(("*E",))
    assert keys.mtp_to_hybrid(gpt) == hybrid
    assert keys.mtp_to_gpt(hybrid) == gpt
    assert canonical(hybrid, Numbering((), (), (0, 1))) == gpt


def with_mtp(folder):
    """The override that builds all MTP layers of a checkpoint."""
    return {"mtp_num_layers": getattr(read_hf(folder), "num_nextn_predict_layers", None)}


def checkpoint(name, folder):
    """A folder of a case of the zoo, with an MTP layer if the case has one."""
    if name not in mtp_checkpoints.CASES or name.startswith("qwen"):
        return tiny.random_checkpoint(zoo.cases()[name].hf, folder)
    folder.mkdir()
    save(mtp_checkpoints.published(hf := mtp_checkpoints.config(name)), hf, folder)
    return folder


def trained(folder, dims, model):
    """The parts of training with megatron-core's distributed optimizer; see ``stepping.optimized``."""
    build = {"dims": dims, "dtype": torch.float32, "device": "cpu", "model": model}
    chunks = mb.build_model(folder, **build, overrides=with_mtp(folder))
    return stepping.optimized(chunks, dims, tiny.tokens(4))


def go_on(folder, saved, here, there):
    """Runs in each worker: each class trains and saves, and both classes continue from the save on another mesh."""
    found = {}
    for writer in ("gpt", "hybrid"):
        with stepping.mesh(ParallelDims(**here)):
            models, optimizer, step = trained(folder, ParallelDims(**here), writer)
            step()
            mb.save_checkpoint(models, saved / writer, optimizer=optimizer)
            exported = {name: tensor.clone() for name, tensor in mb.to_hf_state_dict(models).items()}
        for reader in ("gpt", "hybrid"):
            with stepping.mesh(ParallelDims(**there)):
                models, optimizer, step = trained(folder, ParallelDims(**there), reader)
                mb.load_checkpoint(models, saved / writer, optimizer=optimizer)
                loaded = mb.to_hf_state_dict(models)
                assert all(torch.equal(tensor, exported[name]) for name, tensor in loaded.items())
                losses = [step() for _ in range(2)]
                after = {name: tensor.clone() for name, tensor in mb.to_hf_state_dict(models).items()}
                found[writer, reader] = losses, after
    return found


@needs_it
@pytest.mark.parametrize("name", NAMES)
def test_training_goes_on_in_the_other_class(name, tmp_path):
    folder = checkpoint(name, tmp_path / "hf")
    here, there = {"tp": 2, "sp": True, "etp": 1, "ep": 2}, {"pp": 2}
    for found in pool.run(2, go_on, folder, tmp_path, here, there):
        losses, weights = found["gpt", "gpt"]
        for other in found.values():
            assert other[0] == losses
            assert other[1].keys() == weights.keys()
            assert all(torch.equal(other[1][each], weights[each]) for each in weights)
    for each, norm in (("gpt", "final_layernorm"), ("hybrid", "final_norm")):
        keys = TorchDistFolder.open(tmp_path / each).metadata.state_dict_metadata.keys()
        assert {f"decoder.{norm}.weight", f"optimizer.state.exp_avg.decoder.{norm}.weight"} <= keys
    convert(tmp_path / "hybrid", tmp_path / "back", on_event=lambda *event: None)
    convert(tmp_path / "gpt", tmp_path / "plain", on_event=lambda *event: None)
    back, plain = Checkpoint(tmp_path / "back"), Checkpoint(tmp_path / "plain")
    assert set(back) == set(plain)
    assert all(torch.equal(back[each], plain[each]) for each in back)


def read_parts(folder, saved):
    """Runs in a worker: the other class reads adapters alone, adapters with the base, and layers in one tensor."""
    from megatron.core import dist_checkpointing

    dims, all_adapters = ParallelDims(), []
    build = {"dims": dims, "dtype": torch.float32, "device": "cpu"}
    stepping.let_megatron_save()
    with stepping.mesh(dims):
        (gpt,) = mb.build_model(folder, **build)
        saved.mkdir()
        dist_checkpointing.save({"model": gpt.sharded_state_dict()}, str(saved))
        assert TorchDistFolder.open(saved).is_stacked != bool(gpt.config.num_moe_experts)
        expected = {name: tensor.clone() for name, tensor in mb.to_hf_state_dict([gpt]).items()}
        hybrid = mb.build_model(folder, **build, load_weights=False, model="hybrid")
        mb.load_checkpoint(hybrid, saved)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in mb.to_hf_state_dict(hybrid).items())
        for seed, model in enumerate(("hybrid", "gpt")):
            models = mb.build_model(folder, **build, model=model)
            add_adapters(models, rank=2, alpha=3, targets=["q_proj", "linear_fc1", "down_proj"], seed=seed)
            for part in ("everything", "adapters"):
                if seed:
                    mb.load_checkpoint(models, f"{saved}.{part}", part=part)
                else:
                    mb.save_checkpoint(models, f"{saved}.{part}", part=part)
                all_adapters.append({name: tensor.clone() for name, tensor in iter_hf_adapters(models)})
    return all_adapters


@needs_it
@pytest.mark.parametrize(("name", "count"), [("qwen3", 4 * 2 * 4), ("qwen3_moe", 86)])
def test_each_class_reads_adapters_and_layers_in_one_tensor(tmp_path, name, count):
    folder = tiny.random_checkpoint(zoo.cases()[name].hf, tmp_path / "hf")
    (found,) = pool.run(1, read_parts, folder, tmp_path / "saved")
    assert len(found[0]) == count
    for other in found[1:]:
        assert all(torch.equal(tensor, found[0][name]) for name, tensor in other.items())


@needs_it
@pytest.mark.parametrize("name", zoo.params(KEYED))
def test_keys_are_those_of_megatron_cores_own_layers(name):
    """megatron-core's stack numbers the layers, and its Mamba layer names the parts."""
    hf, predicted = zoo.cases()[name].hf, int(name.startswith("nemotron_h"))
    if predicted:
        hf.num_nextn_predict_layers, hf.mtp_layers_block_type = 1, ["full_attention", "mlp"]
    dims = ParallelDims(pp=2, layout=f"Et|ttt{'m' * predicted}L")
    build = {"dtype": torch.float32, "backend": "torch", "load_weights": False, "model": "hybrid"}
    overrides = {"mtp_num_layers": predicted or None}
    with rank_of(dims, 1, 2):
        (ours,) = mb.build_model(hf, dims=dims, device="meta", **build, overrides=overrides)
        theirs = built_elsewhere(hf, dims, device="meta", overrides=overrides)
        found = []
        for state in (model.sharded_state_dict(metadata=dict(CONTENT)) for model in (ours, theirs)):
            entries = [each for each in state.values() if not hasattr(each, "unique_key")]  # not the extra states
            found.append({plain_key(leaf.key): leaf.global_shape for each in entries for leaf in leaves_of(each)})
    assert found[0] == found[1]


def shapes_of(state):
    """The global shape of each tensor, by key and offset. The extra states of megatron-core's layers hold nothing."""
    entries = [each for of_chunk in state.values() for each in of_chunk.values() if not hasattr(each, "unique_key")]
    leaves = [leaf for entry in entries for leaf in leaves_of(entry)]
    return {(plain_key(leaf.key), leaf.global_offset): leaf.global_shape for leaf in leaves}


@needs_it
def test_keys_of_every_family_are_those_of_the_other_class_and_back():
    """Keys of megatron-core's own stack and layers. Keys of an optimizer's moments follow from them."""
    build, compared = {"dims": ParallelDims(), "dtype": torch.float32, "device": "meta", "load_weights": False}, set()
    for case in zoo.cases().values():
        overrides = {"mtp_num_layers": getattr(case.hf, "num_nextn_predict_layers", None)}
        if case.model_type in compared:
            continue
        with rank_of(ParallelDims(), 0, 1), contextlib.suppress(ConfigError):  # a page lists what is refused
            classes = [mb.build_model(case.hf, **build, overrides=overrides, model=each) for each in ("hybrid", "gpt")]
            states = [sharded_states(chunks, dict(CONTENT), "everything") for chunks in classes]
            hybrid, gpt = map(shapes_of, states)
            theirs = built_elsewhere(case.hf, ParallelDims(), device="meta", overrides=overrides)
            assert hybrid == shapes_of({"": theirs.sharded_state_dict(metadata=dict(CONTENT))}), case.model_type
            for state, (chunk,), is_hybrid, other in zip(states, classes, (False, True), (gpt, hybrid), strict=True):
                respell(state, chunk, hybrid=is_hybrid)
                assert shapes_of(state) == other, case.model_type
            compared.add(case.model_type)
    assert {"qwen3_moe", "granitemoehybrid", "deepseek_v3", "granite"} <= compared


ELSEWHERE = {
    "qwen3": ({"pp": 2}, "*-*|-*-*-"),  # the second layer is cut
    "granitemoehybrid": ({"tp": 2, "sp": True}, None),
    "qwen3_moe": ({"ep": 2}, None),
    "qwen3_next-dense": ({"tp": 2, "sp": True}, None),
    "deepseek_v3": ({"pp": 2}, None),  # with an MTP layer
}


def go_elsewhere(folders, out):
    """Runs in each worker: the differences between a folder and the model of a trainer that has loaded it."""
    wrong = []
    for name, (sizes, pattern) in ELSEWHERE.items():
        dims, folder = ParallelDims(**sizes), folders[name]
        with stepping.mesh(dims):
            model = built_elsewhere(read_hf(folder), dims, pattern=pattern, overrides=with_mtp(folder))
            mb.adopt(model, folder)
            report = mb.load_hf_weights([model], folder)
            assert (report.missing, report.unexpected) == ((), ())
            exported = mb.to_hf_state_dict(model)
            said = [mb.forward(model, tiny.tokens(2)).log_probs] if name == "qwen3" else []
            mb.save_hf_checkpoint(model, f"{out}/{name}")
            mb.save_checkpoint(model, f"{out}/{name}-dist")
            build = {"dims": dims, "dtype": torch.float32, "device": "cpu", "overrides": with_mtp(folder)}
            ours = mb.build_model(folder, **build, load_weights=False)
            mb.load_checkpoint(ours, f"{out}/{name}-dist")
            loaded = mb.to_hf_state_dict(ours)
            said += [mb.forward(ours, tiny.tokens(2)).log_probs] if said else []
            mb.save_checkpoint(ours, f"{out}/{name}-gpt")
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            mb.load_checkpoint(model, f"{out}/{name}-gpt")
            back = mb.to_hf_state_dict(model)
        if said and not torch.equal(*said):
            wrong.append(f"{name}: log-probs")
        expected = read(folder)
        for way, found in {"export": exported, "save": read(f"{out}/{name}"), "dist": loaded, "gpt": back}.items():
            assert found.keys() == expected.keys(), (name, way)
            wrong += [f"{name}: {way} of {each}" for each in found if not torch.equal(found[each], expected[each])]
    return wrong


@needs_it
def test_a_model_that_another_trainer_built(tmp_path):
    """Its halves get the numbers of HF's layers, with any cut of the pipeline, and it reads a GPTModel's checkpoint."""
    folders = {name: str(checkpoint(name, tmp_path / f"{name}-hf")) for name in ELSEWHERE}
    assert pool.run(2, go_elsewhere, folders, str(tmp_path)) == [[], []]


@needs_it
def test_layers_of_another_model_are_refused():
    hf = zoo.cases()["qwen3"].hf
    with rank_of(ParallelDims(), 0, 1):
        model = built_elsewhere(hf, ParallelDims(), device="meta")
        for ask in (held_tensors, bind):
            with pytest.raises(MappingError, match=r"not made by build_model.*call adopt"):
                ask([model])
        with pytest.raises(MappingError, match=r"must have the layers '\*E\*-\*E\*E', as the HF config says, found"):
            bind(model, provenance_on(model, zoo.cases()["qwen3_moe"].hf))
        model.hybrid_layer_pattern += "/*E"
        with pytest.raises(MappingError, match=r"must have MTP layers of '\*-', as the HF config says, found '\*E'"):
            provenance_on(model, hf)


def test_names_of_megatron_cores_own_mixer():
    numbering = Numbering((0, 1))
    names = {
        "layers.0.mixer.in_proj.layer_norm_weight": "layers.0.input_layernorm.weight",
        "layers.1.norm.weight": "layers.1.input_layernorm.weight",
        "layers.1.mixer.norm.weight": "layers.1.self_attention.norm.weight",
        "layers.1.mixer.conv1d_weight": "layers.1.self_attention.conv1d.weight",
        "layers.1.mixer.A_log": "layers.1.self_attention.A_log",
    }
    assert {name: canonical(f"decoder.{name}", numbering) for name in names} == {
        name: f"decoder.{own}" for name, own in names.items()
    }
