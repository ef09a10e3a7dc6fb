"""Converting HF folders to megatron-core checkpoints and back keeps all bits, for any writer and number of times."""

import json
import os
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import mcore_bridge as mb
from mcore_bridge import ParallelDims
from mcore_bridge.commands import text
from mcore_bridge.commands.app import app
from mcore_bridge.convert.convert import convert
from mcore_bridge.convert.hf_to_torch import rank_files
from mcore_bridge.convert.reference_model import _placed, whole_model
from mcore_bridge.errors import CheckpointError, ConfigError
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.dist_checkpoint.folder import TorchDistFolder, find_checkpoint
from mcore_bridge.weights.files.hf_folder import Checkpoint
from tests import zoo
from tests.support import bailing, memory, mtp_checkpoints, pool, stepping, twins
from tests.support.conversions import MOE, StoppedError, assert_exact, mb_config, quiet, small, stop_half_way, written
from tests.support.experts import fused
from tests.support.logs import messages_of
from tests.support.strategies import random_state, save, tiny

FAMILIES = [  # together they have every layout, and every parameter that megatron-core splits
    *("llama", "gemma2", "gpt_oss", "olmo2", "phi3", "qwen2_moe", "hunyuan_v1_moe", "minimax_m2", "starcoder2"),
    *("deepseek_v3", "deepseek_v32", "qwen3_next", "qwen3.5-moe", "mixtral", "laguna", "gemma4", "gemma4-experts"),
    *("bailing_hybrid", "olmo_hybrid"),
]
LING = "bailing_moe_v2"


@pytest.mark.parametrize("name", [*zoo.params(FAMILIES), LING])
def test_every_family_comes_back(name, tmp_path):
    hf = zoo.cases()[name].hf if name != LING else twins.read(LING, bailing.TINY["grouped"])
    state = random_state(hf, dtype=torch.bfloat16)
    source = written(state, hf, tmp_path / "hf")
    convert(source, tmp_path / "dist", file_bytes=20_000, on_event=quiet)
    convert(tmp_path / "dist", tmp_path / "back", file_bytes=30_000, on_event=quiet)
    assert_exact(tmp_path / "back", state)
    assert not list(tmp_path.glob("**/.mcore*"))
    kinds = {path.suffix for path in (tmp_path / "dist").iterdir()}
    assert kinds == {".distcp", ".json", ".pt", ""}, "something is left of the work"


@pytest.mark.parametrize("name", zoo.params((*mtp_checkpoints.NAMES[:2], "deepseek_v4")))
def test_layers_for_multi_token_prediction_come_back_when_they_are_asked_for(name, tmp_path):
    hf = mtp_checkpoints.config(name)
    state = mtp_checkpoints.published(hf)
    source = written(state, hf, tmp_path / "hf")
    for number in (0, 1):
        dist, back = tmp_path / f"dist{number}", tmp_path / f"back{number}"
        converted = convert(source, dist, num_mtp_layers=number, on_event=quiet)
        convert(dist, back, hf=source, on_event=quiet)
        assert_exact(back, state)
        copies = {each for entry in converted.conversion.model.entries for each in entry.copies}
        own = {name for name in state if mtp_checkpoints.is_mtp(hf, name)}
        assert set(converted.conversion.ignored) == (copies if number else own)
    old = written({name: torch.zeros_like(tensor) for name, tensor in state.items()}, hf, tmp_path / "old")
    convert(tmp_path / "dist0", tmp_path / "trained", hf=old, on_event=quiet)
    expected = {name: state[name] if name not in own - copies else torch.zeros_like(state[name]) for name in state}
    assert_exact(tmp_path / "trained", expected)  # copies of embedding and head are those of the model, not of ``old``
    for number, options in enumerate(({"hf": source, "mtp": "dropped"}, {})):
        convert(tmp_path / "dist0", tmp_path / f"bare{number}", **options, on_event=quiet)
        assert_exact(tmp_path / f"bare{number}", {name: state[name] for name in state.keys() - own})
        assert not getattr(mb_config(tmp_path / f"bare{number}"), "num_nextn_predict_layers", None)


# what megatron-core reads and writes ----------------------------------------------------------------------------------


def read_and_write(sources: list[Path], converted: list[Path], folders: list[Path]) -> None:
    """megatron-core alone loads the converted checkpoint, and writes it as its trainers do."""
    from megatron.core import dist_checkpointing

    stepping.let_megatron_save()
    for source, folder, target in zip(sources, converted, folders, strict=True):
        experts = {"ep": 2, "etp": 1} if "moe" in (source / "config.json").read_text() else {}
        dims = ParallelDims(tp=2, sp=True, **experts)
        with stepping.mesh(dims):
            (model,) = mb.build_model(source, dims=dims, device="cpu", load_weights=False)
            metadata = dist_checkpointing.load_content_metadata(str(folder))
            loaded = dist_checkpointing.load({"model": model.sharded_state_dict(metadata=metadata)}, str(folder))
            model.load_state_dict(loaded["model"])
            expected, found = Checkpoint(source), mb.to_hf_state_dict(model)
            assert set(found) == set(expected)
            assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
            for layer in model.decoder.layers:  # keys of a model whose specs have separate norms
                layer.submodules_config.sharded_state_dict_keys_map = {}
            save_as_trainers_do(model, target, singleton_local_shards=bool(experts))
        with stepping.mesh(ParallelDims(pp=2)):
            (model,) = mb.build_model(source, dims=ParallelDims(pp=2), device="cpu", load_weights=False)
            assert mb.load_checkpoint(model, target).common["iteration"] == 7
            assert all(torch.equal(each, expected[name]) for name, each in mb.to_hf_state_dict(model).items())


def save_as_trainers_do(model: Any, folder: Path, **metadata: bool) -> None:
    """Save in Megatron-LM's layout: with an iteration and the states of an optimizer and a generator beside the
    model.
    """
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    target = folder / "iter_0000007"
    target.mkdir(parents=True, exist_ok=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    rank, size = dist.get_rank(), dist.get_world_size()
    state = {
        "model": model.sharded_state_dict(metadata=metadata),
        "optimizer": ShardedTensor.from_rank_offsets("optimizer.state.exp_avg", torch.ones(3), (0, rank, size)),
        "rng_state": ShardedObject("rng_state", [rank], (size,), (rank,)),
        "iteration": 7,
    }
    dist.barrier()
    dist_checkpointing.save(state, str(target))


def test_megatron_core_reads_it_and_what_it_writes_is_read(tmp_path):
    """Trainers write one tensor for all layers without experts, and a tensor for each of the experts."""
    sources, converted, saved = ([tmp_path / f"{name}{i}" for i in range(2)] for name in ("hf", "dist", "saved"))
    for i, (model_type, fields) in enumerate((("qwen3_moe", MOE), ("qwen3", {"tie_word_embeddings": True}))):
        hf = tiny(model_type, vocab_size=97, **fields)
        convert(written(random_state(hf, dtype=torch.bfloat16), hf, sources[i]), converted[i], on_event=quiet)
    pool.run(2, read_and_write, sources, converted, saved)
    keys = [set(TorchDistFolder.open(folder).tensors) for folder in saved]
    assert "decoder.layers.0.mlp.experts.experts.3.linear_fc1.weight_w" in keys[0]
    assert {"decoder.layers.self_attention.linear_qkv.weight", "decoder.layers.input_layernorm.weight"} <= keys[1]
    for i in range(2):
        convert(saved[i], tmp_path / f"back{i}", hf=sources[i], on_event=quiet)
        assert_exact(tmp_path / f"back{i}", Checkpoint(sources[i]))


FUSED = {
    "llama": ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"),
    "qwen2_moe": ("self_attention.linear_qkv.layer_norm_weight", "pre_mlp_layernorm.weight"),
    "qwen3_next": ("self_attention.in_proj.layer_norm_weight", "pre_mlp_layernorm.weight"),
    "deepseek_v3": (
        *("input_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        *("self_attention.linear_q_up_proj.layer_norm_weight", "self_attention.linear_kv_up_proj.layer_norm_weight"),
    ),
}


@pytest.mark.parametrize("name", zoo.params(FUSED))
def test_norms_are_spelled_as_the_specs_of_transformer_engine_do(name, tmp_path):
    """megatron-core 0.16.1 and 0.19.2, gpt_layer_specs.py and experimental_attention_variant_module_specs.py."""
    zoo.cases()[name].hf.save_pretrained(tmp_path)
    model = whole_model(tmp_path, dtype=torch.bfloat16)
    keys = {place.key for each in model.placed for place in each.chunks}
    assert {f"decoder.layers.0.{key}" for key in FUSED[name]} <= keys
    states = {key.partition("/")[0] for key in model.objects}
    assert "decoder.final_layernorm._extra_state" in states, "TransformerEngine's norms ask for it"
    assert not any("router" in key or key.startswith(("embedding", "output_layer")) for key in states)


def test_experts_are_read_as_their_own_folder_has_them_whatever_the_folder_of_the_config_has(tmp_path):
    split = small(tmp_path / "split", num_experts=8)
    hf, state = mb_config(split), dict(Checkpoint(split))
    stacked = written(fused(state), hf, tmp_path / "stacked")
    hf.save_pretrained(tmp_path / "config")
    for source, config in ((stacked, tmp_path / "config"), (stacked, split), (split, stacked)):
        dist, back = tmp_path / f"{source.name}_{config.name}", tmp_path / f"back_{source.name}_{config.name}"
        convert(source, dist, hf=config, on_event=quiet)
        convert(dist, back, on_event=quiet)
        assert_exact(back, state)


# the work -------------------------------------------------------------------------------------------------------------


def test_two_runs_to_one_target_do_not_mix(tmp_path):
    """The second begins while the first writes."""
    source, target, refused = small(tmp_path / "hf"), tmp_path / "target", []

    def begin_another(*event: object) -> None:
        if not refused:
            with pytest.raises(CheckpointError, match=r"process \d+ on .* writes to .*: wait for its end") as error:
                convert(source, target, on_event=quiet)
            refused.append(error)

    convert(source, target, on_event=begin_another)
    assert len(refused) == 1
    convert(target, tmp_path / "back", on_event=quiet)
    assert_exact(tmp_path / "back", Checkpoint(source))


@pytest.mark.parametrize("back", [False, True], ids=["to torch_dist", "to HF"])
def test_an_interrupted_conversion_goes_on_where_it_was(back, tmp_path):
    source = small(tmp_path / "hf")
    if back:
        convert(source, tmp_path / "dist", on_event=quiet)
    first, target = tmp_path / ("dist" if back else "hf"), tmp_path / "target"

    with pytest.raises(StoppedError):
        convert(first, target, file_bytes=20_000, on_event=stop_half_way)
    (partial,) = target.glob("*/new")
    assert os.listdir(target) == [partial.parent.name]
    kept = {
        path.name: path.stat().st_mtime_ns for path in partial.iterdir() if path.suffix in (".distcp", ".safetensors")
    }
    converted = convert(first, target, file_bytes=20_000, on_event=quiet)
    assert converted.num_kept == len(kept) > 1
    assert all((target / name).stat().st_mtime_ns == when for name, when in kept.items())
    if not back:
        convert(target, tmp_path / "back", on_event=quiet)
    assert_exact(target if back else tmp_path / "back", Checkpoint(source))
    assert not list(target.glob(".mcore*"))


def test_what_was_left_of_another_source_is_not_used(tmp_path):
    source, target = small(tmp_path / "hf"), tmp_path / "target"

    def stop(rank: int, phase: str, done: int, total: int) -> None:
        raise StoppedError

    with pytest.raises(StoppedError):
        convert(source, target, file_bytes=20_000, on_event=stop)
    save({name: -tensor for name, tensor in Checkpoint(source).items()}, mb_config(source), source)
    assert convert(source, target, file_bytes=20_000, on_event=quiet).num_kept == 0


@pytest.mark.parametrize("back", [False, True], ids=["to torch_dist", "to HF"])
def test_what_was_left_of_another_config_or_release_is_not_used(back, tmp_path, monkeypatch):
    """Old files are not used even if all shapes are equal, such as with half as many heads of twice the size."""
    hf = tiny("llama", num_attention_heads=4, num_key_value_heads=2)
    source = written(random_state(hf, dtype=torch.bfloat16), hf, tmp_path / "hf")
    tiny("llama", num_attention_heads=2, num_key_value_heads=1, head_dim=48).save_pretrained(tmp_path / "other")
    if back:
        convert(source, tmp_path / "dist", on_event=quiet)
    first, target = tmp_path / ("dist" if back else "hf"), tmp_path / "target"

    for config, release in ((tmp_path / "other", mb.__version__), (source, "another")):
        monkeypatch.setattr("mcore_bridge.convert.resume.__version__", release)
        with pytest.raises(StoppedError):
            convert(first, target, hf=config, file_bytes=20_000, on_event=stop_half_way)
        monkeypatch.undo()
        assert convert(first, target, hf=source, file_bytes=20_000, on_event=quiet).num_kept == 0
        if not back:
            convert(target, tmp_path / "back", on_event=quiet)
        assert_exact(target if back else tmp_path / "back", Checkpoint(source))


def test_the_command_converts_with_several_processes(tmp_path):
    source = small(tmp_path / "hf")
    (source / "tokenizer.json").write_text("{}")
    for first, second in (("hf", "dist"), ("dist", "back")):
        result = CliRunner().invoke(app, ["convert", str(tmp_path / first), str(tmp_path / second), "--processes", "2"])
        assert result.exit_code == 0, result.output
    assert_exact(tmp_path / "back", Checkpoint(source))
    assert (tmp_path / "back" / "tokenizer.json").is_file()
    tensors = Checkpoint(source).values()
    numel = sum(tensor.numel() for tensor in tensors)
    assert f"{text.count(numel)} parameters in {len(tensors)} tensors" in " ".join(result.output.split())


def test_code_of_the_model_and_of_its_tokenizer_comes_along_with_what_it_imports(tmp_path):
    source = small(tmp_path / "hf")
    code = {"modeling_x.py", "tokenization_x.py", "processing_x.py", "declarations.py", "preprocessor_config.json"}
    for name in code:
        (source / name).write_text(name)
    convert(source, tmp_path / "dist", on_event=quiet)
    convert(tmp_path / "dist", tmp_path / "back", on_event=quiet)
    for folder in ("dist", "back"):
        assert {path.name for path in (tmp_path / folder).iterdir() if path.name in code} == code


def test_memory_is_that_of_the_largest_parameters_and_not_of_the_model(tmp_path):
    hf = tiny("llama", vocab_size=64, hidden_size=640, intermediate_size=2560, num_hidden_layers=16, head_dim=80)
    source, largest = written(random_state(hf, dtype=torch.bfloat16), hf, tmp_path / "hf"), 2 * 2560 * 640 * 2
    total = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    whole_model(source, dtype=torch.bfloat16)  # the memory of megatron-core itself for the layout
    for first, second in (("hf", "dist"), ("dist", "back")):
        before = memory.begin()
        convert(tmp_path / first, tmp_path / second, file_bytes=largest, on_event=quiet)
        taken = memory.peak() - before
        assert taken < 8 * largest < total / 3, f"{taken} bytes for {total}, the largest parameter of {largest}"
    assert_exact(tmp_path / "back", Checkpoint(source))


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there are GPUs")
def test_gpus_that_are_not_there_are_refused(tmp_path):
    result = CliRunner().invoke(app, ["convert", str(small(tmp_path / "hf")), str(tmp_path / "dist"), "--gpus", "2"])
    assert result.exit_code == 1
    assert "--gpus 2 needs as many GPUs, found 0; --processes 2 writes the same bytes" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("of_model", ["", "model"], ids=["before 0.9", "since 0.9"])
def test_a_checkpoint_of_verl_is_found_and_its_config_beside_it(of_model, tmp_path):
    source, actor = small(tmp_path / "hf"), tmp_path / "global_step_5" / "actor"
    folder = actor / of_model
    convert(source, folder / "dist_ckpt", on_event=quiet)
    (folder / "huggingface").mkdir()
    (folder / "dist_ckpt" / "config.json").rename(folder / "huggingface" / "config.json")
    convert(actor, tmp_path / "back", on_event=quiet)
    assert_exact(tmp_path / "back", Checkpoint(source))
    (folder / "huggingface" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json in any of .*huggingface.*--hf"):
        convert(actor, tmp_path / "again", on_event=quiet)


# refusals -------------------------------------------------------------------------------------------------------------


def test_folders_with_nothing_to_convert_say_what_was_expected(tmp_path):
    older = tmp_path / "older"
    older.mkdir()
    with pytest.raises(
        CheckpointError, match=r"older is no checkpoint.* in it, in its dist_ckpt or model/dist_ckpt, or"
    ):
        convert(older, tmp_path / "back", on_event=quiet)
    (older / "pytorch_model.bin").touch()
    source = small(tmp_path / "hf")
    shutil.copy(source / "config.json", older)
    with pytest.raises(CheckpointError, match=r"a config\.json, but neither \*\.safetensors nor .*save_pretrained"):
        convert(older, tmp_path / "back", on_event=quiet)
    with pytest.raises(
        CheckpointError, match="hf is an HF folder, not a checkpoint of megatron-core: load it by load_hf_weights"
    ):
        find_checkpoint(source)
    for source in (tmp_path / "mistyped", older / "config.json"):
        with pytest.raises(CheckpointError, match=f"{source.name} is no folder: expected an HF folder, or"):
            convert(source, tmp_path / "back", on_event=quiet)


def test_what_does_not_fit_is_named(tmp_path):
    """A field of the config that no code reads fits, unless ``strict_config`` refuses it."""
    source = small(tmp_path / "hf")
    config = {**json.loads((source / "config.json").read_text()), "a_note": "unread"}
    (source / "config.json").write_text(json.dumps(config))
    convert(source, tmp_path / "dist", on_event=quiet)
    for folder in (source, tmp_path / "dist"):
        with pytest.raises(ConfigError, match=r"strict_config=True accepts only .* found a_note='unread'"):
            convert(folder, tmp_path / "back", strict_config=True, on_event=quiet)
    for change, message, of_hf in (
        ({"num_hidden_layers": 3}, r"unexpected.*decoder\.layers\.3\.", r"unexpected \['model\.layers\.3\."),
        ({"num_hidden_layers": 5}, r"missing.*decoder\.layers\.4\.", r"missing \['model\.layers\.4\."),
        ({"hidden_size": 56}, r"has shape .*, the config takes", r"model\..* has shape .*, the config takes"),
        ({"vocab_size": 98}, *[r"has shape \(97, 48\), the config takes \(98, 48\)"] * 2),
    ):
        other = tmp_path / "other"
        other.mkdir(exist_ok=True)
        (other / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(CheckpointError, match=message):
            convert(tmp_path / "dist", tmp_path / "back", hf=other, on_event=quiet)
        with pytest.raises(CheckpointError, match=of_hf):
            convert(source, tmp_path / "back", hf=other, on_event=quiet)
    state = dict(Checkpoint(source))
    wrapped = written({f"module.{name}": each for name, each in state.items()}, mb_config(source), tmp_path / "wrapped")
    with pytest.raises(CheckpointError, match=r"begin with 'module\.': remove this prefix"):
        convert(wrapped, tmp_path / "back", on_event=quiet)
    state["model.norm.weight"] = state["model.norm.weight"].float()
    mixed = written(state, mb_config(source), tmp_path / "mixed")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is float32, and bfloat16 cannot hold"):
        convert(mixed, tmp_path / "back", on_event=quiet)
    with pytest.raises(CheckpointError, match=r"no checkpoint of megatron-core.*no such file"):
        convert(tmp_path, tmp_path / "back", on_event=quiet)
    with pytest.raises(CheckpointError, match="both source and target"):
        convert(source, source, on_event=quiet)
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (lambda numbers: numbers.flip(0), "w has rows of a parameter in another order"),
        (lambda numbers: numbers[:2], "gives no location for a part of w"),
    ],
)
def test_what_a_later_megatron_core_may_split_otherwise_is_refused(part, message):
    def build(key, numbers, *others):
        return {"w": SimpleNamespace(key="w", data=part(numbers), global_shape=(4, 2), global_offset=(0, 0))}

    spec, tensor = TensorSpec("w", (4, 2), torch.float32), torch.zeros(4, 2)
    sharded = SimpleNamespace(key="w", build_fn=build, replica_id=0)
    with pytest.raises(CheckpointError, match=message):
        _placed(0, SimpleNamespace(held=spec), {"w": tensor}, {id(tensor): sharded})


def test_a_folder_that_is_not_whole_is_not_taken_for_one(tmp_path):
    source, dist, back = small(tmp_path / "hf"), tmp_path / "dist", tmp_path / "back"
    convert(source, dist, file_bytes=20_000, on_event=quiet)
    kept = (dist / ".metadata").read_bytes()
    metadata = pickle.loads(kept)
    metadata.state_dict_metadata["decoder.layers.0.mlp.experts.experts.linear_fc1.weight"].chunks.pop()
    (dist / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"only parts of 1 tensor,.*experts.*save did not finish"):
        convert(dist, back, on_event=quiet)
    (dist / ".metadata").write_bytes(kept)
    file = dist / "__0_0.distcp"
    whole = file.read_bytes()
    for damaged in (whole[: len(whole) // 2], bytes(len(whole)), b"\x80\x02U\xff" * (len(whole) // 4), None):
        file.write_bytes(damaged) if damaged else file.unlink()
        with pytest.raises(CheckpointError, match=r"cannot read .* copy the folder again") as raised:
            convert(dist, back, on_event=quiet)
        assert "weights_only" not in str(raised.value), "torch says how to run what is there"
        assert ("distcp must have" in str(raised.value)) == (len(damaged or b"") < len(whole))
    file.write_bytes(whole)
    (dist / ".metadata").write_bytes(kept[:100])
    with pytest.raises(CheckpointError, match=r"no readable \.metadata"):
        convert(dist, back, on_event=quiet)
    (dist / ".metadata").write_bytes(kept)
    convert(dist, back, on_event=quiet)
    assert_exact(back, Checkpoint(source))


def test_numbers_that_a_cast_makes_infinite_are_named(tmp_path):
    hf = tiny("qwen3", num_hidden_layers=1)
    state = random_state(hf) | {"model.norm.weight": torch.full((hf.hidden_size,), 1e6)}
    source, dist, files = written(state, hf, tmp_path / "hf"), tmp_path / "dist", tmp_path / "files"
    form = rank_files("torch", ParallelDims(), "te")
    convert(source, dist, on_event=quiet)
    convert(source, files, rank_files=form, on_event=quiet)
    for number, (start, to) in enumerate([(source, None), (source, form), (dist, None), (files, None)]):
        with messages_of() as messages:
            convert(start, tmp_path / str(number), dtype=torch.float16, rank_files=to, on_event=quiet)
        assert [" infinite in 1 tensors, such as" in message for message in messages] == [True], (start, to)
    note = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    convert(source, tmp_path / "encoded", plain=True, quantize=note, on_event=quiet)
    with messages_of() as messages:
        convert(tmp_path / "encoded", tmp_path / "plain", plain=True, dtype=torch.float16, on_event=quiet)
    assert [" infinite in 1 tensors, such as" in message for message in messages] == [True]
