"""Converts HF folders to Megatron's older files, one for each place on a mesh, and back."""

import collections
import os
import subprocess
from argparse import Namespace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import mcore_bridge as mb
from mcore_bridge import ParallelDims
from mcore_bridge.architecture import read_hf
from mcore_bridge.commands.app import app
from mcore_bridge.convert.assemble import specs_of
from mcore_bridge.convert.convert import convert
from mcore_bridge.convert.hf_to_torch import rank_files
from mcore_bridge.convert.rank_files.file import NAME, read_rank_file
from mcore_bridge.convert.rank_files.file_layout import FileLayout, Style
from mcore_bridge.convert.rank_files.rank_folder import iter_mg_weights
from mcore_bridge.convert.reference_model import whole_model
from mcore_bridge.errors import BridgeError, CheckpointError, MeshError
from mcore_bridge.launch.fake_rank import rank_of
from mcore_bridge.trainers.rlinf import convert_hf_to_mg
from mcore_bridge.weights.files.hf_folder import Checkpoint
from mcore_bridge.weights.files.torch_save import read_torch_file, write_torch_file
from tests import zoo
from tests.support import memory, mtp_checkpoints
from tests.support.conversions import StoppedError, assert_exact, mb_config, quiet, small, stop_half_way, written
from tests.support.rlinf_files import asked as block_of
from tests.support.rlinf_files import name_of_this_rank
from tests.support.strategies import random_state, tiny

MESHES: dict[str, dict[str, Any]] = {
    "one rank": {},
    "dense": {"tp": 2, "pp": 2},
    "experts": {"tp": 2, "pp": 2, "ep": 2},
    "experts alone": {"ep": 4},
    "experts that are cut": {"tp": 4, "ep": 2, "etp": 2},
    "virtual stages": {"tp": 2, "pp": 2, "vp": 2},
    "another layout": {"pp": 3, "layout": "Et|t|ttL"},
}


def files(backend: str = "te", **sizes: Any) -> Any:
    return rank_files("torch", ParallelDims(**sizes), backend)


@pytest.mark.parametrize("backend", ["te", "torch"])
@pytest.mark.parametrize("mesh", MESHES)
def test_any_mesh_comes_back(mesh, backend, tmp_path):
    """The mesh of the files is not passed: it is inferred."""
    source = small(tmp_path / "hf")
    convert(source, tmp_path / "files", rank_files=files(backend, **MESHES[mesh]), on_event=quiet)
    convert(tmp_path / "files", tmp_path / "back", file_bytes=20_000, on_event=quiet)
    assert_exact(tmp_path / "back", Checkpoint(source))
    assert {path.name for path in (tmp_path / "files").iterdir()} >= {"release", "config.json"}
    assert not list((tmp_path / "files").rglob("*.partial"))


FAMILIES = [
    "deepseek_v3",
    "qwen3_next",
    "gpt_oss",
    "qwen2_moe",
    "gemma2",
    "phi3",
    "mixtral",
    "starcoder2",
    "laguna",
    "gemma4",
    "bailing_hybrid",
    "olmo_hybrid",
    "gemma4-experts",
    "afmoe",
    "axk1",
    "glm5_next_text",
    "kimi_linear",
    "deepseek_v4",
    "minimax_m3_vl_text",
    "qwen4_exp_text",
]


@pytest.mark.parametrize("name", zoo.params(FAMILIES))
def test_families_come_back(name, tmp_path):
    hf = zoo.cases()[name].hf
    state = random_state(hf, dtype=torch.bfloat16)
    source = written(state, hf, tmp_path / "hf")
    convert(source, tmp_path / "files", rank_files=files("torch", tp=2), on_event=quiet)
    convert(tmp_path / "files", tmp_path / "back", on_event=quiet)
    assert_exact(tmp_path / "back", state)


FUSED = [
    "llama",
    "qwen2_moe",
    "qwen3_next",
    "deepseek_v3",
    "glm_moe_dsa-shared",
    "hy_v4",
    "glm5_next_text",
    "kimi_linear",
    "deepseek_v4",
    "minimax_m3_vl_text",
    "qwen4_exp_text",
]


@pytest.mark.parametrize("name", zoo.params(FUSED))
def test_norms_are_in_the_modules_in_which_transformer_engine_has_them(name, tmp_path):
    """They have the names that megatron-core itself gives them in checkpoints."""
    hf = zoo.cases()[name].hf
    hf.save_pretrained(tmp_path)
    model = whole_model(tmp_path, dtype=torch.bfloat16)
    layout = FileLayout(hf, ParallelDims(), {spec.name: spec for spec in specs_of(model.entries)}, Style(grouped=True))
    named = {name for file in layout.files() for _, name, _, _ in layout.held(file)}
    keys = {place.key for each in model.placed for place in each.chunks}
    assert {name for name in named if "norm" in name} == {key for key in keys if "norm" in key}


def ranks(source: Path, dims: ParallelDims, num_ranks: int, folder: Path) -> None:
    """Each file loads strictly into the model of its rank, which then equals a model loaded from the HF folder."""
    for rank in range(num_ranks):
        with rank_of(dims, rank, num_ranks):
            models, expected = (
                mb.build_model(source, dims=dims, device="cpu", backend="torch", load_weights=load)
                for load in (False, source)
            )
            held = read_rank_file(folder / "release" / name_of_this_rank(dims) / NAME)
            assert len(held) == len(models)
            for (key, state), model, other in zip(held.items(), models, expected, strict=True):
                assert key == "model" or key == f"model{model.vp_stage}"
                model.load_state_dict(state)
                assert all(
                    torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True)
                )


def test_files_are_what_the_models_of_their_ranks_load(tmp_path):
    source, dims = small(tmp_path / "hf"), ParallelDims(tp=2, pp=2, vp=2)
    convert(source, tmp_path / "files", rank_files=files("torch", tp=2, pp=2, vp=2), on_event=quiet)
    ranks(source, dims, 4, tmp_path / "files")


def test_what_rlinf_asks_for_is_read_as_well(tmp_path):
    """RLinf's block has separate experts but fused norms. The folder that RLinf loads is also accepted alone."""
    source = small(tmp_path / "hf")
    convert_hf_to_mg(str(source), block_of(tmp_path / "mg", tp=2, ep=2, grouped_gemm=None))
    for number, folder in enumerate((tmp_path / "mg", tmp_path / "mg" / "release")):
        convert(folder, tmp_path / f"back{number}", hf=source, on_event=quiet)
        assert_exact(tmp_path / f"back{number}", Checkpoint(source))


def test_a_folder_without_a_norm_or_an_embedding_is_refused(tmp_path):
    """They belong to no layer, so nothing else shows that they are missing."""
    source = small(tmp_path / "hf")
    state = dict(Checkpoint(source))
    for name in ("model.norm.weight", "model.embed_tokens.weight"):
        left = {other: tensor.clone() for other, tensor in state.items() if other != name}
        written(left, read_hf(source), tmp_path / name)
        with pytest.raises(CheckpointError, match=f"missing tensors .*{name}"):
            convert_hf_to_mg(str(tmp_path / name), block_of(tmp_path / "mg", tp=1))


def test_what_megatron_keeps_beside_the_model_is_left_alone(tmp_path):
    """Its trainer also saves arguments, and the state of an optimizer."""
    source = small(tmp_path / "hf")
    convert(source, tmp_path / "files", rank_files=files("torch", tp=2), on_event=quiet)
    iteration = (tmp_path / "files" / "release").rename(tmp_path / "files" / "iter_0000007")
    (tmp_path / "files" / "latest_checkpointed_iteration.txt").write_text("7\n")
    for path in iteration.glob(f"*/{NAME}"):
        held = torch.load(path, weights_only=True)
        optimizer = {"optimizer": {"state": {0: torch.ones(3)}}, "param_groups": [{"lr": 0.1}]}
        torch.save({**held, "args": Settings(tensor_model_parallel_size=2), "optimizer": optimizer}, path)
    convert(tmp_path / "files", tmp_path / "back", on_event=quiet)
    assert_exact(tmp_path / "back", Checkpoint(source))


def test_layers_for_multi_token_prediction_are_read(tmp_path):
    """The file holds the state dict of a real model."""
    hf = mtp_checkpoints.config(mtp_checkpoints.CASES[0])
    state = mtp_checkpoints.published(hf)
    source, path = written(state, hf, tmp_path / "hf"), tmp_path / "files" / "mp_rank_00" / NAME
    path.parent.mkdir(parents=True)
    with rank_of(ParallelDims(), 0, 1):
        asked = {"dtype": torch.float32, "device": "cpu", "backend": "torch"}
        (model,) = mb.build_model(source, overrides={"mtp_num_layers": 1}, **asked)
        torch.save({"model": {name: each for name, each in model.state_dict().items() if each is not None}}, path)
    convert(tmp_path / "files", tmp_path / "back", hf=source, on_event=quiet)
    assert_exact(tmp_path / "back", state)


def test_dtypes_are_cast_where_that_is_asked_for(tmp_path):
    source = small(tmp_path / "hf")
    convert(source, tmp_path / "files", rank_files=files(tp=2), dtype=torch.float32, on_event=quiet)
    wide = {name: tensor.float() for name, tensor in Checkpoint(source).items()}
    convert(tmp_path / "files", tmp_path / "wide", on_event=quiet)
    assert_exact(tmp_path / "wide", wide)
    convert(tmp_path / "files", tmp_path / "narrow", dtype=torch.bfloat16, on_event=quiet)
    assert_exact(tmp_path / "narrow", Checkpoint(source))


def test_a_dtype_that_a_model_keeps_as_it_is_must_hold_what_is_stored(tmp_path):
    """The bias of a router stays fp32 in a model of any dtype."""
    hf = zoo.cases()["deepseek_v3"].hf
    source = written(random_state(hf, dtype=torch.bfloat16), hf, tmp_path / "hf")
    convert(source, tmp_path / "files", rank_files=files("torch"), on_event=quiet)
    (path,) = (tmp_path / "files").rglob(NAME)
    held = torch.load(path, weights_only=True)
    model = {name: each.double() if name.endswith("expert_bias") else each for name, each in held["model"].items()}
    torch.save({"model": model}, path)
    with pytest.raises(CheckpointError, match=r"expert_bias is float64, and float32 in a model.*leave out --dtype"):
        convert(tmp_path / "files", tmp_path / "narrow", dtype=torch.bfloat16, on_event=quiet)
    convert(tmp_path / "files", tmp_path / "back", on_event=quiet)
    kept = {name for name, tensor in Checkpoint(tmp_path / "back").items() if tensor.dtype == torch.float64}
    assert len(kept) == sum(name.endswith("expert_bias") for name in model) > 0


# the work -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("back", [False, True], ids=["to files", "to HF"])
def test_an_interrupted_conversion_goes_on_where_it_was(back, tmp_path):
    source, wanted = small(tmp_path / "hf"), files(pp=4)
    if back:
        convert(source, tmp_path / "files", rank_files=wanted, on_event=quiet)
    first, target = tmp_path / ("files" if back else "hf"), tmp_path / "target"
    seen: list[int] = []

    def stop(rank: int, phase: str, done: int, total: int) -> None:
        seen.append(done)
        stop_half_way(rank, phase, done, total)

    again = {} if back else {"rank_files": wanted}
    with pytest.raises(StoppedError):
        convert(first, target, file_bytes=20_000, on_event=stop, **again)
    assert len(seen) > 20, "the progress within a file was not told"
    (partial,) = target.glob("*/new")
    assert os.listdir(target) == [partial.parent.name]
    kept = [path for path in partial.rglob("*") if path.name == NAME or path.suffix == ".safetensors"]
    times = {path.relative_to(partial): path.stat().st_mtime_ns for path in kept}
    assert convert(first, target, file_bytes=20_000, on_event=quiet, **again).num_kept == len(times) > 0
    assert all((target / name).stat().st_mtime_ns == when for name, when in times.items())
    if not back:
        convert(target, tmp_path / "back", on_event=quiet)
    assert_exact(target if back else tmp_path / "back", Checkpoint(source))


def test_what_was_left_of_another_mesh_is_not_used(tmp_path):
    source, target = small(tmp_path / "hf"), tmp_path / "target"

    with pytest.raises(StoppedError):
        convert(source, target, rank_files=files(pp=4), on_event=stop_half_way)
    assert convert(source, target, rank_files=files("torch", pp=4), on_event=quiet).num_kept == 0
    names = set(read_rank_file(target / "release" / "mp_rank_00_001" / NAME)["model"])
    assert "decoder.layers.0.input_layernorm.weight" in names


def test_the_command_converts_with_several_processes(tmp_path):
    source = small(tmp_path / "hf")
    (source / "tokenizer.json").write_text("{}")
    to_files = ("--to", "torch", "--tp", "2", "--pp", "2", "--ep", "2")
    for first, second, more in (("hf", "files", to_files), ("files", "back", ())):
        paths = [str(tmp_path / first), str(tmp_path / second)]
        result = CliRunner().invoke(app, ["convert", *paths, *more, "--processes", "2"])
        assert result.exit_code == 0, result.output
    assert_exact(tmp_path / "back", Checkpoint(source))
    assert (tmp_path / "back" / "tokenizer.json").is_file()


def test_memory_is_that_of_the_largest_parameters_and_not_of_a_file(tmp_path):
    hf = tiny("llama", vocab_size=64, hidden_size=640, intermediate_size=2560, num_hidden_layers=16, head_dim=80)
    source, largest = written(random_state(hf, dtype=torch.bfloat16), hf, tmp_path / "hf"), 2 * 2560 * 640 * 2
    total = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    whole_model(source, dtype=torch.bfloat16)  # the memory of megatron-core itself for the layout
    for first, second, wanted in (("hf", "files", files()), ("files", "back", None)):
        before = memory.begin()
        convert(tmp_path / first, tmp_path / second, rank_files=wanted, on_event=quiet)
        taken = memory.peak() - before
        assert taken < 8 * largest < total / 3, f"{taken} bytes for {total}, the largest parameter of {largest}"
    (file,) = (tmp_path / "files").rglob(NAME)
    assert file.stat().st_size > total
    assert_exact(tmp_path / "back", Checkpoint(source))


class Precision(Enum):
    """An enum, as in the configs of trainers."""

    BF16 = 1


class Settings:
    """A class that a reader of the file may lack. RLinf's arguments, for example, are of a class of omegaconf."""

    def __init__(self, **fields):
        self.fields = fields


class Mine(torch.Tensor):
    """A subclass of Tensor that is not in torch."""


class Calls:
    """An object whose pickle would call a function when it is read."""

    def __init__(self, function, *arguments):
        self.made = function, arguments

    def __reduce__(self):
        return self.made


def test_objects_of_other_classes_are_passed_over_and_nothing_is_run(tmp_path):
    path, ran = tmp_path / "file.pt", tmp_path / "ran"
    settings = Settings(precision=Precision.BF16, inner=Settings(), path=tmp_path)
    for args in (settings, Namespace(settings=settings), Calls(subprocess.check_call, ["touch", str(ran)])):
        torch.save({"model": {"weight": torch.arange(3)}, "args": args}, path)
        assert read_torch_file(path)["model"]["weight"].tolist() == [0, 1, 2]
    torch.save({"model": {}, "args": Calls(os.system, f"touch {ran}")}, path)
    with pytest.raises(CheckpointError, match=r"cannot be skipped, of posix\.system \(.*\); save it again"):
        read_torch_file(path)
    for left in (
        Calls(os.system, f"touch {ran}"),
        collections.defaultdict(int, {"a": 1}),
        torch.ones(1).as_subclass(Mine),
    ):
        torch.save({"model": {}, "args": left}, path)
        with pytest.raises(CheckpointError, match=r"cannot be skipped, of .*save it again"):
            read_torch_file(path)
    torch.save({"model": {}}, path, pickle_protocol=4)
    with pytest.raises(CheckpointError, match=r"cannot be skipped, of torch itself \(.*\); save it again"):
        read_torch_file(path)
    assert not ran.exists()


def test_what_is_no_state_of_a_chunk_is_told_apart(tmp_path):
    path = tmp_path / NAME
    weight = torch.arange(3)
    torch.save({"model": {"weight": weight, "x._extra_state": None}, "model_config": Settings(), 1: 2}, path)
    assert list(read_rank_file(path)) == ["model"]
    for state, message in (
        (Settings(), "a dict of tensors as 'model0', found Opaque"),
        ({"w": Settings()}, r"\['w'\]"),
    ):
        torch.save({"model0": state}, path)
        with pytest.raises(CheckpointError, match=message):
            read_rank_file(path)
    torch.save([weight], path)
    with pytest.raises(CheckpointError, match="must hold a dict, found list: is it a checkpoint"):
        read_torch_file(path)
    with pytest.raises(CheckpointError, match="has 24 bytes for a tensor of 32"):
        write_torch_file(path, {"w": torch.empty_like(weight)}, [torch.arange(4)])


# refusals -------------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_named(tmp_path):
    source, target = small(tmp_path / "hf"), tmp_path / "back"
    convert(source, tmp_path / "files", rank_files=files(tp=2, pp=2, ep=2), on_event=quiet)
    for change, message in (
        (
            {"num_hidden_layers": 3},
            r"not whole, or does not fit the given HF config.*layers \[0, 1, 2, 3\], expected 0 to 2",
        ),
        ({"num_hidden_layers": 5}, r"layers \[0, 1, 2, 3\], expected 0 to 4"),
        ({"hidden_size": 56}, r"other shapes for \['lm_head\.weight: \(97, 48\), not \(97, 56\)'"),
        ({"vocab_size": 99}, r"hold 98 rows of a vocabulary of 99"),
        ({"num_experts": 2}, r"holds more than 1 experts in a layer"),
        ({"num_experts": 8}, r"no rank of the group holds the experts"),
        ({"tie_word_embeddings": True}, r"output_layer\.weight of .* differs from the embedding.*set it to False"),
    ):
        config = mb_config(source)
        config.update(change)
        config.save_pretrained(tmp_path / "other")
        with pytest.raises(CheckpointError, match=message):
            convert(tmp_path / "files", target, hf=tmp_path / "other", on_event=quiet)
    with pytest.raises(CheckpointError, match=r"hf has no mp_rank_\*/model_optim_rng.pt, nor has the iteration"):
        next(iter_mg_weights(source))
    with pytest.raises(CheckpointError, match="need an HF folder as source"):
        convert(tmp_path / "files", target, rank_files=files(), on_event=quiet)
    for wanted, options, message in (
        (files(), {"num_mtp_layers": 1}, "leave out --mtp"),
        (files(), {"vision": "train"}, "only torch_dist can have a tower, found vision='train'"),
        (files(), {"num_processes": 0}, "expected processes of at least 1 and GPUs of at least 0, found 0 and 0"),
        (files(), {"num_gpus": -1}, "expected processes of at least 1 and GPUs of at least 0, found 1 and -1"),
        (files(tp=3), {}, "tp=3"),
        (files(tp=2, ep=1, etp=4), {}, "expected expert_tensor_parallel_size to divide tp=2, found 4"),
    ):
        with pytest.raises(BridgeError, match=message):
            convert(source, target, rank_files=wanted, on_event=quiet, **options)
    with pytest.raises(MeshError, match="torch_dist loads at any mesh, found TP2"):
        rank_files("torch_dist", ParallelDims(tp=2), "te")
    assert not target.exists()


def test_a_folder_that_is_not_whole_is_not_taken_for_one(tmp_path):
    source, target = small(tmp_path / "hf"), tmp_path / "back"
    convert(source, tmp_path / "files", rank_files=files(tp=2, pp=4), on_event=quiet)
    release = tmp_path / "files" / "release"
    other = small(tmp_path / "other")
    for place, kind in ((source, "hf"), (tmp_path / "files", "torch")):
        with pytest.raises(
            CheckpointError, match=f"holds a checkpoint of kind {kind}, whose config.json a checkpoint of kind"
        ):
            convert(other, place, on_event=quiet)
    first, path = (release / f"mp_rank_{rank}_002" / NAME for rank in ("00", "01"))
    kept, other_rank = path.read_bytes(), torch.load(first, weights_only=True)["model"]
    layer = "decoder.layers.0."

    def lacking(start: str) -> dict[str, torch.Tensor]:
        return {key: tensor for key, tensor in other_rank.items() if not key.startswith(start)}

    no_router, no_expert = lacking(f"{layer}mlp.router."), lacking(f"{layer}mlp.experts.linear_fc2.weight3")
    renumbered = {key.replace(layer, "decoder.layers.7."): tensor for key, tensor in other_rank.items()}
    for one, two, message in (
        (no_router, no_router, r"it lacks parameters for .*'model\.layers\.2\.mlp\.gate\.weight'\]"),
        (no_expert, no_expert, r"no rank of the group holds the experts \[3\]"),
        (other_rank, lacking(layer), "mp_rank_01_002 holds 0 layers in model, other files of its stage do not"),
        (other_rank, renumbered, "expected layers numbered from 0 on, found 1 of them up to 7"),
    ):
        torch.save({"model": one}, first)
        torch.save({"model": two}, path)
        with pytest.raises(CheckpointError, match=message):
            convert(tmp_path / "files", target, on_event=quiet)
    path.write_bytes(kept[: len(kept) // 2])
    with pytest.raises(CheckpointError, match=r"cannot read .*mp_rank_01_002.*copy it again"):
        convert(tmp_path / "files", target, on_event=quiet)
    path.unlink()
    first.unlink()
    with pytest.raises(CheckpointError, match=r"no file for pp_rank \[2\]"):
        convert(tmp_path / "files", target, on_event=quiet)
    path.parent.rename(release / "mp_rank_1")
    first.parent.rename(release / "mp_rank_0")
    for number in (0, 1):
        torch.save({"model": other_rank}, release / f"mp_rank_{number}" / NAME)
    with pytest.raises(CheckpointError, match="names of files to have the form mp_rank_00_000_000, found mp_rank_0"):
        convert(tmp_path / "files", target, on_event=quiet)
    assert not target.exists()
