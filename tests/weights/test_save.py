"""Saves: written files can be loaded on any mesh and by transformers, and no file is held in memory.

Tests of processes that die or write to one target are in ``test_atomic_folder.py``.
"""

import json
import os
import re
import resource
import shutil
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import mcore_bridge as mb
from mcore_bridge.errors import BridgeError, CheckpointError
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.files.hf_folder import Checkpoint
from mcore_bridge.weights.files.staging import Staging
from mcore_bridge.weights.save import write_pairs
from tests.support import fake_mesh, memory, pool
from tests.support.limits import limited
from tests.support.strategies import random_state, tiny
from tests.support.strategies import save as save_state

HF = tiny("qwen3", vocab_size=97, architectures=["Qwen3ForCausalLM"])


def save_everywhere(folder, dims, dtype, max_shard_bytes):
    dims.initialize(device="cpu")
    state = random_state(HF)
    models = mb.build_model(HF, dims=dims, dtype=torch.float32, device="cpu", load_weights=state)
    return mb.save_hf_checkpoint(models, folder, dtype=dtype, max_shard_bytes=max_shard_bytes)


@pytest.mark.parametrize("dims", [mb.ParallelDims(tp=2, pp=2), mb.ParallelDims(tp=2)], ids=str)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_what_is_saved_is_the_manifest_and_loads_in_transformers(tmp_path, dims, dtype):
    """Saves run on 4 ranks, with one replica or two."""
    manifests = pool.run(4, save_everywhere, str(tmp_path / "out"), dims, dtype, 40_000)
    assert all(manifest == manifests[0] for manifest in manifests)
    found = mb.Manifest.from_folder(tmp_path / "out")
    assert found.differences(manifests[0]) == ()
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == found.num_bytes
    assert set(index["weight_map"]) == {spec.name for spec in found}
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True, dtype="auto")
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    state = random_state(HF)
    assert model.dtype == (dtype or torch.float32)
    assert all(torch.equal(tensor, state[name].to(tensor.dtype)) for name, tensor in model.state_dict().items())
    assert os.listdir(tmp_path) == ["out"]


def build_one(value=1.0, head="lm"):
    state = {name: tensor * value for name, tensor in random_state(HF).items()}
    return mb.build_model(HF, dims=mb.ParallelDims(), dtype=torch.float32, device="cpu", load_weights=state, head=head)


@pytest.fixture
def alone():
    with fake_mesh.rank_of(mb.ParallelDims(), 0, 1):
        yield


def test_tokenizer_files_come_along_and_other_files_stay(tmp_path, alone):
    source = tmp_path / "source"
    source.mkdir()
    mb.save_hf_checkpoint(build_one(), source)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "chat_template.jinja"):
        (source / name).write_text(name)
    (source / "notes.txt").write_text("not of the model")
    target = tmp_path / "target"
    (target / "logs").mkdir(parents=True)
    (target / "logs" / "train.log").write_text("kept")
    (target / "model-00001-of-00009.safetensors").write_text("old weights")
    (target / "old-of-its-index.safetensors").write_text("old weights")
    (target / "model.safetensors.index.json").write_text('{"weight_map": {"a": "old-of-its-index.safetensors"}}')
    (target / "adapter_model.safetensors").write_text("somebody else's")
    models = mb.build_model(source, dims=mb.ParallelDims(), dtype=torch.float32, device="cpu")
    mb.save_hf_checkpoint(models, target)
    assert (target / "tokenizer.json").read_text() == "tokenizer.json"
    assert (target / "chat_template.jinja").exists()
    assert not (target / "notes.txt").exists()
    assert (target / "logs" / "train.log").read_text() == "kept"
    assert not (target / "model-00001-of-00009.safetensors").exists()
    assert not (target / "old-of-its-index.safetensors").exists()
    assert (target / "adapter_model.safetensors").read_text() == "somebody else's"
    assert (
        mb.Manifest.from_folder(target, digests=True).differences(mb.Manifest.from_folder(source, digests=True)) == ()
    )


KINDS = {
    "lm": "Qwen3ForCausalLM",
    "value": "Qwen3ForSequenceClassification",
    "process_reward": "Qwen3ForProcessRewardModel",
}


@pytest.mark.parametrize("head", KINDS)
def test_a_config_and_a_tokenizer_that_are_there_stay_where_it_is_asked(tmp_path, alone, head):
    source, target = tmp_path / "source", tmp_path / "target"
    mb.save_hf_checkpoint(build_one(), source)
    target.mkdir()
    for name in ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "modeling_own.py"):
        (source / name).write_text("of the source")
    for name in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        (target / name).write_text("of a trainer")
    changed = json.loads((source / "config.json").read_text()) | {"max_position_embeddings": 777}
    (target / "config.json").write_text(json.dumps(changed))
    models = mb.build_model(source, dims=mb.ParallelDims(), dtype=torch.float32, device="cpu", head=head)
    mb.save_hf_checkpoint(models, target, keep=True)
    for name in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (target / name).read_text() == "of a trainer"
    assert not (target / "special_tokens_map.json").exists(), "it is of another tokenizer"
    assert (target / "modeling_own.py").exists()
    config = json.loads((target / "config.json").read_text())
    assert (config["max_position_embeddings"], config["architectures"]) == (777, [KINDS[head]])
    mb.save_hf_checkpoint(models, target)
    assert json.loads((target / "config.json").read_text())["max_position_embeddings"] == HF.max_position_embeddings
    assert (target / "tokenizer_config.json").read_text() == "of the source"


def test_a_value_head_saves_as_a_classifier_that_transformers_loads(tmp_path, alone):
    mb.save_hf_checkpoint(build_one(head="value"), tmp_path / "critic")
    model, info = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.score.weight.shape == (1, HF.hidden_size)
    again = mb.build_model(tmp_path / "critic", dims=mb.ParallelDims(), dtype=torch.float32, device="cpu", head="value")
    assert torch.equal(again[0].output_layer.weight, model.score.weight)


def test_what_comes_must_be_what_was_announced():
    """Headers are written first, so a file has no place for more bytes."""
    spec = TensorSpec("w", (2,), torch.float32)
    for pairs, message in (
        ([("w", torch.ones(3))], r"w came as torch\.float32 \(3,\), the manifest has .*: change no model while it is"),
        ([("w", torch.ones(2).bfloat16())], r"w came as torch\.bfloat16 \(2,\), the manifest has"),
        ([("b", torch.ones(2))], r"the export lacks 1 tensor of its manifest: \['w'\]"),
    ):
        with pytest.raises(CheckpointError, match=message):
            write_pairs((pair for pair in pairs), {"w": (None, spec)}, Staging(1000))


def fail_to_write(folder, rank):
    """Save with a limit at which files of one rank can hold headers, but not tensors: a writing thread raises."""
    models = build_two()
    try:
        with limited(resource.RLIMIT_FSIZE, 20_000, dist.get_rank() == rank):
            mb.save_hf_checkpoint(models, folder, max_shard_bytes=40_000, slot_bytes=1000)
    except CheckpointError as error:
        return str(error), threads()
    return "nothing raised", []


def build_two():
    mb.ParallelDims(tp=2).initialize(device="cpu")
    return mb.build_model(
        HF, dims=mb.ParallelDims(tp=2), dtype=torch.float32, device="cpu", load_weights=random_state(HF)
    )


def threads():
    """The running threads of this library."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("staging")]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_write_raises_on_all_and_leaves_the_target_alone(tmp_path, rank):
    target = tmp_path / "out"
    target.mkdir()
    (target / "config.json").write_text("old")
    for message, left in pool.run(2, fail_to_write, str(target), rank, timeout=60):
        assert message.endswith(f"rank {rank} of the group: OSError: [Errno 27] File too large")
        assert left == []
    assert (target / "config.json").read_text() == "old"
    assert os.listdir(tmp_path) == ["out"]


def fail_to_open(folder, rank):
    models, save = build_two(), mb.save_hf_checkpoint
    try:
        with limited(resource.RLIMIT_NOFILE, 1, dist.get_rank() == rank):
            save(models, folder, max_shard_bytes=10_000)
    except CheckpointError as error:
        return str(error)
    return "nothing raised"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_even_begin_raises_on_all(tmp_path, rank):
    for message in pool.run(2, fail_to_open, str(tmp_path / "out"), rank, timeout=60):
        assert "[Errno 24] Too many open files" in message.split(f"rank {rank} of the group: ")[1]
    assert os.listdir(tmp_path) == []


def save_and_load_many(folder):
    """Save and load a file for each tensor. Return the most files that were open at once, without files open before."""
    mb.ParallelDims().initialize(device="cpu")
    state, dims, most = random_state(HF), mb.ParallelDims(), 0
    models = mb.build_model(HF, dims=dims, dtype=torch.float32, device="cpu", load_weights=state)
    before = max(map(int, os.listdir("/proc/self/fd")))
    gaps = [open(os.devnull) for _ in range(before)]  # noqa: SIM115  # numbers below that would be given first
    before = max(before, *(file.fileno() for file in gaps))

    def watched(path, flags, *arguments):
        nonlocal most
        most = max(most, opened := os_open(path, flags, *arguments))
        return opened

    os_open = os.open
    with limited(resource.RLIMIT_NOFILE, before + 8, True), mock.patch("os.open", watched):
        written = mb.save_hf_checkpoint(models, folder, max_shard_bytes=1)
        mb.load_hf_weights(models, folder)
        digests = mb.Manifest.from_folder(folder, digests=True)
        assert digests.differences(mb.manifest(models, digests=True)) == ()
        first = Checkpoint(folder)
        for path in sorted(Path(folder).glob("*.safetensors")):
            shutil.copy2(path, f"{path}.new")
            os.replace(f"{path}.new", path)
        with pytest.raises(CheckpointError, match=r"was replaced after it was opened, and could not stay open beside"):
            list(first.values())
    with limited(resource.RLIMIT_NOFILE, 1, True), pytest.raises(CheckpointError, match=r"too many .*ulimit -n"):
        Checkpoint(folder)
    for file in gaps:
        file.close()
    return len(written), most - before


def test_a_folder_may_have_more_files_than_a_process_may_open(tmp_path):
    ((count, most),) = pool.run(1, save_and_load_many, str(tmp_path / "out"))
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == count == 47
    assert 0 < most < 8


def without(models):
    """Each way in which a model may differ from the built model, equal on all ranks."""
    layer = models[0].decoder.layers[0]
    yield r"q_layernorm\.weight had the shape \(24,\), and is gone", layer.self_attention.q_layernorm, None
    rows, columns = layer.mlp.linear_fc2.weight.shape
    wide = torch.nn.Parameter(torch.zeros(2 * rows, columns))
    yield r"linear_fc2\.weight had the shape \(48, 80\), and has \(96, 80\)", layer.mlp.linear_fc2, wide


def save_what_has_changed(folder):
    mb.ParallelDims(pp=2).initialize(device="cpu")
    models = mb.build_model(
        HF, dims=mb.ParallelDims(pp=2), dtype=torch.float32, device="cpu", load_weights=random_state(HF)
    )
    for message, module, tensor in without(models):
        kept, module.weight = module.weight, tensor
        for save in (mb.save_hf_checkpoint, mb.save_checkpoint):
            with pytest.raises(CheckpointError, match=message):
                save(models, folder)
        with pytest.raises(BridgeError, match=message):
            mb.to_hf_state_dict(models)
        module.weight = kept
    for call in (mb.save_hf_checkpoint, mb.load_hf_weights):
        where = folder if call is mb.save_hf_checkpoint else random_state(HF)
        with pytest.raises(BridgeError, match=r"1 that match none: \['\*\.nrom\.weight'\]"):
            call(models, where, dtype={"*.nrom.weight": torch.float32, "*.layers.3.*norm.weight": torch.float32})
    rank, loss = dist.get_rank(), float("nan")
    in_another_order = dict([("a", loss), ("b", (1, 2))][:: 1 - 2 * rank])  # so that the pickles differ
    same = {"set": {"a", "b"}, "items": [in_another_order]}
    others = {
        "fewer keys": dict.fromkeys("ab"[: 2 - rank]),
        "longer": [1] * (1 + rank),
        "more keys": dict.fromkeys("ab"[: 1 + rank]),
        "rng": torch.full((3,), rank),
        "shorter": (1,) * (2 - rank),
    }
    with pytest.raises(CheckpointError, match=f"expected equal values in common .* at {re.escape(str([*others]))} "):
        mb.save_checkpoint(models, folder, common={**same, **others})
    mb.save_checkpoint(models, folder, common={**same, "loss": loss, "rng": torch.zeros(3)})


def test_models_that_lost_a_tensor_and_arguments_that_mean_nothing_are_refused(tmp_path):
    pool.run(2, save_what_has_changed, str(tmp_path / "out"))
    assert not list(tmp_path.glob("out/*.safetensors"))


def save_hungrily(folder, hf):
    """Bytes that a save adds to resident memory while it runs."""
    mb.ParallelDims().initialize(device="cpu")
    models = mb.build_model(hf, dims=mb.ParallelDims(), dtype=torch.float32, device="cpu", load_weights=False)
    for parameter in models[0].parameters():
        parameter.data.fill_(1.0)
    before = memory.begin()
    mb.save_hf_checkpoint(models, folder, slot_bytes=1 << 20)
    return memory.peak() - before


def test_a_file_is_never_held_in_memory(tmp_path):
    """The file has 154 MB, its largest tensor 12 MB."""
    hf = tiny("llama", vocab_size=8000, hidden_size=384, intermediate_size=1536, num_hidden_layers=14, head_dim=48)
    (added,) = pool.run(1, save_hungrily, str(tmp_path / "out"), hf)
    (path,) = (tmp_path / "out").glob("*.safetensors")
    assert path.stat().st_size > 10 * 8000 * 384 * 4
    assert added <= path.stat().st_size // 2


def test_a_relative_folder_is_known_after_the_working_folder_has_changed(tmp_path, monkeypatch, caplog):
    """Trainers change it, as hydra does for each run."""
    source = tmp_path / "source"
    source.mkdir()
    save_state(random_state(HF), HF, source)
    (source / "tokenizer.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    with fake_mesh.rank_of(mb.ParallelDims(), 0, 1):
        models = mb.build_model("source", dims=mb.ParallelDims(), dtype=torch.bfloat16, device="cpu")
        monkeypatch.chdir(source)
        with pytest.raises(CheckpointError, match="a folder that these models came from, and would lose bits"):
            mb.save_hf_checkpoint(models, source)
        for _ in range(2):
            assert "replaces its weights" not in caplog.text
            mb.save_hf_checkpoint(models, tmp_path / "out")
        for _ in range(2):
            mb.save_hf_checkpoint(models, source, dtype=torch.float32)
    assert caplog.text.count(f"{source} is a folder that these models came from: this save replaces its weights") == 1
    assert (tmp_path / "out" / "tokenizer.json").exists()


def classes_written(folder):
    """The classes in the configs of a save and of a checkpoint of megatron-core, for a model whose config has none."""
    dims = mb.ParallelDims()
    dims.initialize(device="cpu")
    models = mb.build_model(tiny("qwen3"), dims=dims, device="cpu", load_weights=False)
    mb.save_hf_checkpoint(models, f"{folder}/hf")
    mb.save_checkpoint(models, f"{folder}/dist")
    return [json.loads(Path(folder, kind, "config.json").read_text())["architectures"] for kind in ("hf", "dist")]


def test_a_config_without_a_class_gets_the_class_of_its_family(tmp_path):
    assert pool.run(1, classes_written, str(tmp_path)) == [[["Qwen3ForCausalLM"]] * 2]
