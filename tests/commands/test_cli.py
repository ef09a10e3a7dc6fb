"""Runs the command as users do: correct input passes; wrong input gives exit code 1 and one message with the reason."""

import json
import logging
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from rich.console import Console
from rich.progress import Progress
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import Result

import mcore_bridge
from mcore_bridge import BridgeError, Manifest, ParallelDims
from mcore_bridge import architecture as architecture_module
from mcore_bridge.commands import doctor, report, text
from mcore_bridge.commands.plan.tables import plan
from mcore_bridge.commands.verify.logits import TOLERANCE, Comparison
from mcore_bridge.commands.verify.verify import Verdict, _crossing, differences, widest
from mcore_bridge.factory import chunk
from mcore_bridge.factory.blueprint import BuildOptions
from mcore_bridge.factory.hybrid_model import build_hybrid
from mcore_bridge.factory.hybrid_support import RELEASE
from mcore_bridge.launch.processes import RankError, run_ranks
from mcore_bridge.rules.dtypes import wanted_dtype
from mcore_bridge.rules.mapping import Rule
from tests.support import command, composites, seeing, tiny, towers
from tests.support.command import quietly, refused, run
from tests.support.failing_ranks import wait_for_all

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.random_checkpoint(
        tiny.config("qwen3"), tmp_path_factory.mktemp("checkpoints") / "qwen3", dtype=torch.bfloat16
    )


@pytest.fixture
def copied(checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint to break."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in checkpoint.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def edit(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def configured(folder: Path, **fields: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return folder


# verify ---------------------------------------------------------------------------------------------------------------


def test_verify_says_that_all_is_well(checkpoint: Path, tmp_path: Path) -> None:
    result = run(
        "verify", checkpoint, "--tp", 2, "--pp", 2, "--vp", 2, "--sp", "--save", tmp_path / "saved", start=True
    )
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert "exact yes: 47 tensors bit by bit, on all 4 ranks" in said
    assert "saved yes: 47 tensors bit by bit" in said
    assert "largest difference to transformers" in said
    assert shards(tmp_path / "saved")


@pytest.mark.skipif("qwen3_vl" not in towers.NAMES, reason="the installed transformers builds no towers")
@pytest.mark.parametrize("name", ["qwen3_vl", "lighton_ocr", "llava", "kimi_k25", "gemma4"])
def test_verify_shows_an_image_to_both_sides(name: str, tmp_path: Path) -> None:
    """Composites whose images have a grid, any size, the size of the tower, or are patches, also with their places."""
    folder = seeing.written(name, tmp_path)
    if name == "kimi_k25":  # transformers writes names that only transformers reads
        file = folder / "model.safetensors"
        save_file(dict(composites.as_published(name, load_file(file))), file, metadata={"format": "pt"})
    count = len(load_file(folder / "model.safetensors"))
    result = run("verify", folder, "--pp", 2)
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert f"exact yes: {count} tensors bit by bit" in said
    assert "with 1 image" in said


def exchanged(model_type: str, ends: tuple[str, str], function: Callable[..., Any], task: Any) -> Any:
    """Runs in a worker: the rules of a family exchange two tensors."""
    architecture = architecture_module.architectures()[model_type]

    def rules(hf: Any) -> tuple[Rule, ...]:
        def other(name: str) -> str:
            one, two = ends
            return name.replace(one, two) if one in name else name.replace(two, one)

        return tuple(replace(rule, hf=tuple(map(other, rule.hf))) for rule in architecture.rules(hf))

    with mock.patch.dict(architecture_module._REGISTRY, {model_type: replace(architecture, rules=rules)}):
        return quietly(function, task)


@pytest.mark.parametrize(
    "ends",
    [
        (".input_layernorm.", ".post_attention_layernorm."),
        ("k_proj.bias", "v_proj.bias"),
        (".gate_proj.", ".up_proj."),
    ],
)
def test_verify_finds_a_wrong_rule_with_weights_that_nobody_has_trained(
    ends: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers initialises norms to one and biases to zero, so that an exchange of them shows nowhere."""
    AutoModelForCausalLM.from_config(tiny.config("qwen2"), dtype=torch.bfloat16).save_pretrained(tmp_path)
    monkeypatch.setattr(command, "quietly", partial(exchanged, "qwen2", ends))
    result = run("verify", tmp_path, "--pp", 2)
    assert result.exit_code == 1, result.output
    said = " ".join(result.output.split())
    assert "exact yes" in said
    assert "logits WRONG" in said


def test_verify_of_a_context_parallel_mesh_in_another_dtype(checkpoint: Path) -> None:
    model = ["--model", "hybrid"] if RELEASE.is_installed else []
    result = run("verify", checkpoint, "--cp", 2, "--dtype", "float32", "--tokens", 9, *model)
    assert result.exit_code == 0, result.output
    assert "of float32 in 47 tensors" in result.output


def test_verify_keeps_each_dtype_of_a_mixed_checkpoint(copied: Path) -> None:
    def to_fp32(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: each.float() for name, each in tensors.items() if "norm" in name})

    for shard in shards(copied):
        edit(shard, to_fp32)
    result = run("verify", copied, "--tp", 2, "--no-logits")
    assert result.exit_code == 0, result.output
    assert "bfloat16 and float32" in " ".join(result.output.split())


def test_patterns_of_dtypes_are_as_many_as_tensors_of_the_rarer_ones_and_give_each_its_own() -> None:
    dtypes = {"norm": torch.float32, "ids": torch.int64, **{f"experts.{i}": torch.bfloat16 for i in range(9)}}
    checkpoint: Any = {name: torch.empty(1, dtype=dtype) for name, dtype in dtypes.items()}
    crossing = _crossing(checkpoint, tuple(dtypes), None, {torch.float32, torch.bfloat16})
    assert crossing == {"norm": torch.float32, "*": torch.bfloat16}
    assert all(wanted_dtype(name, dtype, crossing) == dtype for name, dtype in dtypes.items())


def test_verify_names_what_differs_from_another_folder(checkpoint: Path, copied: Path) -> None:
    names = []

    def flip(tensors: dict[str, torch.Tensor]) -> None:
        names.append(sorted(tensors)[0])
        tensors[names[0]].view(torch.int16).flatten()[-1] ^= 1  # the lowest bit of the last number

    edit(shards(copied)[0], flip)
    result = run("verify", checkpoint, "--against", copied, "--no-logits")
    assert result.exit_code == 1
    assert f"NO: 1 tensor of 47 differ on 1 rank, as in {copied}: {names[0]}".replace(" ", "") in "".join(
        result.output.split()
    )


def test_files_of_two_folders_are_compared_without_a_model(checkpoint: Path, copied: Path) -> None:
    options = ["verify", checkpoint, "--against", copied, "--files-only"]
    equal = run(*options)
    assert equal.exit_code == 0, equal.output
    assert "have 47 tensors" in " ".join(equal.output.split())
    edit(shards(copied)[0], lambda tensors: next(iter(tensors.values())).view(torch.int16).neg_())
    name = next(iter(load_file(shards(copied)[0])))
    said = run(*options, "--json")
    assert said.exit_code == 1
    assert json.loads(said.stdout) == {
        "good": False,
        "folder": str(checkpoint),
        "against": str(copied),
        "tensors": 47,
        "bytes": sum(tensor.nbytes for path in shards(checkpoint) for tensor in load_file(path).values()),
        "different": [name],
    }
    assert "--tp would have no effect with --files-only" in refused(run(*options, "--tp", 2))
    assert "name the other one by --against" in refused(run("verify", checkpoint, "--files-only"))


def truncate(folder: Path) -> None:
    os.truncate(shards(folder)[1], shards(folder)[1].stat().st_size - 1)


def remove_a_shard(folder: Path) -> None:
    shards(folder)[1].unlink()


def remove_a_tensor(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    name = "model.norm.weight"
    edit(folder / index["weight_map"].pop(name), lambda tensors: tensors.__delitem__(name))
    (folder / INDEX).write_text(json.dumps(index))


def change_a_size(folder: Path) -> None:
    configured(folder, intermediate_size=96)


def unknown_architecture(folder: Path) -> None:
    configured(folder, model_type="xglm")


def unknown_activation(folder: Path) -> None:
    configured(folder, hidden_act="magic")


def remove_the_config(folder: Path) -> None:
    (folder / "config.json").unlink()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (truncate, "truncated"),
        (remove_a_shard, "names files that are missing"),
        (remove_a_tensor, "missing ['model.norm.weight']"),
        (change_a_size, "load the checkpoint of this config"),
        (unknown_architecture, "'xglm'. Nearest names"),
        (unknown_activation, "hidden_act must be one of"),
        (remove_the_config, "config.json"),
    ],
)
def test_verify_refuses_a_broken_checkpoint(copied: Path, damage: Callable[[Path], None], said: str) -> None:
    damage(copied)
    assert said in refused(run("verify", copied, "--tp", 2, "--no-logits"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tp", 3], "--tp 3 must divide num_attention_heads=8: choose another --tp"),
        (["--pp", 3], "equal stages: use --layout balanced, or an explicit layout"),
        (["--sp"], "--sp needs --tp > 1"),
        (["--vp", 2], "--vp 2 needs --pp > 1"),
        (["--pp", 2, "--layout", "Et|t|tL"], "--layout 'Et|t|tL' must have --pp * --vp = 2 * 1 = 2 stages, found 3"),
        (["--ep", 2], "use --ep 1"),
        (["--backend", "mlx"], "--backend must be one of auto, te, torch, found 'mlx'"),
        (["--mtp", 1], "Change --mtp, or"),
        (["--model", "mamba"], "--model must be one of gpt, hybrid"),
        (["--dtype", "float8"], "--dtype must be one of"),
        (["--device", "tpu"], "--device must be one of"),
        (["--device", "cuda", "--tp", 8, "--pp", 4, "--cp", 8], "needs a GPU"),
    ],
)
def test_verify_refuses_a_mesh_that_does_not_fit(checkpoint: Path, options: list[Any], said: str) -> None:
    assert said in refused(run("verify", checkpoint, *options))


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (
            "plan HF --gpu-memory 80 --recompute --sequence 8 --micro-batch 2",
            "--gpu-memory, --micro-batch, --rec",
        ),
        ("plan HF --gpus 2 --layout balanced", "--layout would have no effect with --gpus"),
        ("verify HF --tokens 8 --no-logits", "--tokens would have no effect with --no-logits"),
        ("convert HF OUT --processes 2 --gpus 2", "--processes would have no effect with --gpus"),
        (
            "convert HF OUT --backend torch --drop-mtp",
            "--backend, --drop-mtp would have no effect with --to",
        ),
        ("convert HF OUT --to torch --drop-mtp", "--drop-mtp would have no effect with --to torch"),
        ("convert HF OUT --to hf --mtp 1 --strict-config", "--mtp, --strict-config would have no effect with --to hf"),
        ("convert DIST OUT --mtp 1 --vision train --to torch_dist", "--mtp, --to, --vision would have no effect for a"),
    ],
)
def test_an_option_without_effect_is_refused(command: str, said: str, checkpoint: Path, tmp_path: Path) -> None:
    (dist := tmp_path / "dist").mkdir()
    (dist / "metadata.json").write_text("{}")
    places = {"HF": checkpoint, "OUT": tmp_path / "out", "DIST": dist}
    assert said in refused(run(*(places.get(word, word) for word in command.split())))


def test_a_refusal_is_one_line_on_stderr(copied: Path) -> None:
    truncate(copied)
    command = [sys.executable, "-m", "mcore_bridge.cli", "verify", str(copied)]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 1
    assert finished.stdout.strip() == ""
    assert len(finished.stderr.strip().splitlines()) == 1, finished.stderr
    assert "truncated" in finished.stderr


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert "must be an existing folder" in refused(run("verify", tmp_path / "nothing"))


def _verdict(*, relative: float = 0.0, **different: tuple[str, ...]) -> Verdict:
    nothing: dict[str, Any] = dict.fromkeys(field.name for field in fields(Verdict))
    return Verdict(**nothing | {"logits": Comparison(relative, 1.0, 10), **different})


def test_the_verdict() -> None:
    assert _verdict().good
    assert replace(_verdict(), logits=None).good
    assert _verdict(relative=TOLERANCE).good
    assert not _verdict(relative=TOLERANCE * 1.01).good
    assert not _verdict(relative=float("nan")).good
    for differs in ("different", "saved_different", "adapter_different"):
        assert _verdict(**{differs: ()}).good
        assert not _verdict(**{differs: ("model.norm.weight",)}).good


def test_differences_count_every_replica_and_missing_names() -> None:
    one = Manifest.from_json('[{"name": "a", "shape": [2], "dtype": "float32", "sha256": "0"}]')
    assert differences(one, [one, one]) == ()
    assert differences(one, [one, Manifest(())]) == ("a",)
    assert differences(Manifest(()), [one]) == ("a",)


def test_the_dtype_of_a_checkpoint() -> None:
    assert widest({torch.bfloat16}) is torch.bfloat16
    assert widest({torch.bfloat16, torch.float16}) is torch.float32
    with pytest.raises(BridgeError, match="float8_e4m3fn"):
        widest({torch.bfloat16, torch.float8_e4m3fn})


# processes ------------------------------------------------------------------------------------------------------------


def test_the_bar_of_a_phase_is_over_all_ranks_and_full_when_they_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[Progress] = []

    class Watched(Progress):
        def __init__(self, *columns: Any, **options: Any) -> None:
            super().__init__(*columns, **options)
            bars.append(self)

    monkeypatch.setattr(report, "Progress", Watched)
    monkeypatch.setenv("TERM", "xterm")  # on a dumb terminal rich draws nothing
    console = Console(force_terminal=True, file=StringIO())
    with report.progress(console, 2) as on_event:
        for rank, phase, done, total, completed in [
            (0, "load", 1, 4, 0.25),
            (1, "load", 1, 2, 0.75),
            (0, "load", 4, 4, 1.5),
            (0, "export", 0, 0, 0.0),  # with no work, there must be no division by zero
            (1, "load", 2, 2, 2.0),
            (0, "export", 3, 3, 1.0),
            (1, "export", 3, 3, 2.0),
        ]:
            on_event(rank, phase, done, total)
            (task,) = [task for task in bars[0].tasks if task.description == phase]
            assert (task.completed, task.total) == (completed, 2), (rank, phase, done, total)
    assert isinstance(console.file, StringIO)
    assert "export" in console.file.getvalue(), "nothing was drawn on a terminal"


def test_ranks_return_and_report() -> None:
    events: list[Any] = []
    found = run_ranks(wait_for_all, 7, world_size=2, device="cpu", on_event=lambda *event: events.append(event))
    assert found == [0, 1]
    assert sorted(events) == [(0, "work", 1, 2), (1, "work", 1, 2)]


@pytest.mark.parametrize(
    ("leaver", "world_size", "said"), [(1, 2, "rank 1 of 2: KeyError"), (-1, 3, "rank 1 of 3: died of SIGKILL")]
)
def test_a_rank_that_leaves_ends_the_others(leaver: int, world_size: int, said: str) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=said):
        run_ranks(wait_for_all, leaver, world_size=world_size, device="cpu", on_event=lambda *event: None)
    assert time.monotonic() - start < 120  # much less than the timeout of a process group, half an hour


def test_help_is_quick() -> None:
    """The command does not import torch, since a shell runs it for completions at each key."""
    script = "import sys, mcore_bridge.commands.app; print({'torch', 'numpy', 'transformers'} & sys.modules.keys())"
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert finished.stdout == "set()\n"


# plan -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def llama_70b(tmp_path: Path) -> Path:
    """Only a config: Llama 3.1 70B."""
    folder = tmp_path / "llama"
    tiny.config(
        "llama",
        hidden_size=8192,
        intermediate_size=28672,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        num_hidden_layers=80,
        vocab_size=128256,
        attention_bias=False,
        dtype="bfloat16",
    ).save_pretrained(folder)
    return folder


def test_plan_of_a_folder_with_only_a_config(llama_70b: Path, tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    options = ["--tp", 8, "--pp", 12, "--world", 768, "--layout", "balanced", "--picture", picture]
    result = run("plan", llama_70b, *options)
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert "70.6 B parameters in bfloat16: TP8 PP12, DP8, 768 ranks" in said
    assert "723 HF tensors, 141 GB in all" in said
    cells = [title.text or "" for title in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}title")]
    assert len(cells) == 80 + 2
    assert sum(cell.startswith("layer ") for cell in cells) == 80


def test_plan_spells_a_mesh_for_trainers(llama_70b: Path) -> None:
    """The printed settings are the mesh again."""
    options = ["--tp", 2, "--pp", 4, "--sp", "--layout", "balanced", "--settings"]
    dims = plan(llama_70b, BuildOptions(dims=ParallelDims(tp=2, pp=4, sp=True, layout="balanced"))).blueprint.dims
    assert ParallelDims.from_dict(yaml.safe_load(run("plan", llama_70b, *options, "verl").stdout)) == dims
    nemo = ParallelDims.from_dict(yaml.safe_load(run("plan", llama_70b, *options, "nemo-rl").stdout))
    assert [len(stage.layers) for stage in nemo.stages(80)] == [len(stage.layers) for stage in dims.stages(80)]
    slime = run("plan", llama_70b, *options, "slime").stdout
    assert "--tensor-model-parallel-size 2 \\\n" in slime
    assert f'--sequence-parallel \\\n--pipeline-model-parallel-layout "{dims.layout}"\n' in slime
    said = json.loads(run("plan", llama_70b, *options, "slime", "--json").stdout)
    assert ParallelDims.from_dict(said) == dims
    unequal = ["--pp", 3, "--layout", f"E{'t' * 30}|{'t' * 30}|{'t' * 20}L", "--settings"]
    assert run("plan", llama_70b, *unequal, "nemo-rl").exit_code == 0
    unequal = ["--pp", 4, "--layout", f"E{'t' * 30}|{'t' * 30}|t|{'t' * 19}L", "--settings"]
    assert "NeMo-RL must have equal stages" in refused(run("plan", llama_70b, *unequal, "nemo-rl"))
    assert "--settings must be one of verl" in refused(run("plan", llama_70b, "--settings", "trl"))


@pytest.mark.parametrize("also", [["--tp", 2, "--pp", 2], ["--gpus", 2]])
def test_plan_of_the_other_model_class_is_the_same(also: list[Any], tmp_path: Path, monkeypatch: Any) -> None:
    tiny.config("qwen3").save_pretrained(tmp_path)
    if not RELEASE.is_installed:
        assert "needs megatron-core 0.19" in refused(run("plan", tmp_path, "--model", "hybrid"))
        return
    built = []
    monkeypatch.setattr(chunk, "build_hybrid", lambda *given: built.append(given) or build_hybrid(*given))
    said = [run("plan", tmp_path, *also, "--json", "--model", model).output for model in ("gpt", "hybrid")]
    assert said[0] == said[1]
    assert built


def test_a_picture_that_cannot_be_written(tmp_path: Path) -> None:
    tiny.config("llama").save_pretrained(tmp_path)
    (taken := tmp_path / "taken.svg").mkdir()
    png = tmp_path / "plan.png"
    for picture, expected, why in (
        (taken, "a file that can be written", "Is a directory"),
        (tmp_path / "none" / "plan.SVG", "a file that can be written", "No such file or directory"),
        (png, "a file *.svg", "the picture is written as SVG"),
    ):
        result = run("plan", tmp_path, "--picture", picture)
        assert result.exit_code == (2 if picture == png else 1)
        assert f"--picture must be {expected}, found {picture}: {why}" in " ".join(result.output.split())
        (line,) = run("plan", tmp_path, "--picture", picture, "--json").stdout.splitlines()
        assert list(json.loads(line)) == ["error"]
    assert not png.exists()


@pytest.mark.parametrize(
    "dims", [ParallelDims(), ParallelDims(tp=2, pp=2, vp=2), ParallelDims(tp=4, pp=3, layout="balanced")]
)
@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_plan_counts_what_transformers_counts(model_type: str, dims: ParallelDims, tmp_path: Path) -> None:
    hf = tiny.config(model_type)
    hf.save_pretrained(tmp_path)
    found = plan(tmp_path, BuildOptions(dims=dims), dtype=torch.float32)
    expected = {name: tuple(p.shape) for name, p in tiny.random_model(hf).named_parameters()}
    assert {spec.name: spec.shape for spec in found.export.tensors()} == expected
    layers = [int(cell.name) for chunks in found.ranks for c in chunks for cell in c.cells if cell.name.isdigit()]
    assert sorted(layers) == list(range(4))
    held = sum(chunk.num_bytes for chunks in found.ranks for chunk in chunks)
    assert held >= sum(4 * torch.Size(shape).numel() for shape in expected.values()) / dims.tp


def test_plan_refuses_a_world_that_does_not_fit(llama_70b: Path) -> None:
    assert "1000 ranks are not a multiple" in refused(run("plan", llama_70b, "--tp", 8, "--pp", 8, "--world", 1000))


def test_plan_imports_no_compiler(llama_70b: Path) -> None:
    """Collecting garbage would take a fifth of its time."""
    script = (
        "import sys\n"
        "from mcore_bridge.commands.app import app\n"
        "app(sys.argv[1:], standalone_mode=False)\n"
        "print('megatron.core' in sys.modules, 'torch._inductor.compile_fx' in sys.modules)"
    )
    command = [sys.executable, "-c", script, "plan", llama_70b]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.stdout.splitlines()[-1:] == ["True False"], finished.stdout + finished.stderr


def test_plan_leaves_no_process_group(llama_70b: Path) -> None:
    plan(llama_70b, BuildOptions(dims=ParallelDims(tp=2)))
    assert not torch.distributed.is_initialized()


# doctor ---------------------------------------------------------------------------------------------------------------


def _installed(folder: Path, name: str, *, by_top_level: bool) -> Path:
    info = folder / f"{name.replace('-', '_')}-1.6.5.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.6.5\n")
    if by_top_level:
        (info / "top_level.txt").write_text("mcore_bridge\n")
    else:
        (info / "RECORD").write_text("mcore_bridge/__init__.py,,\n")
        (folder / "mcore_bridge").mkdir()
        (folder / "mcore_bridge" / "__init__.py").touch()
    return folder


def _doctor(path: Path, monkeypatch: pytest.MonkeyPatch) -> Result:
    monkeypatch.setattr(sys, "path", [*sys.path, str(path)])
    monkeypatch.setenv("COLUMNS", "200")
    return run("doctor")


def test_a_command_does_not_tell_of_cuda_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's logger has a handler of its own, so that the level of the root does not matter."""
    logger, said = logging.getLogger("torch.utils.cpp_extension"), StringIO()
    monkeypatch.setattr(logger, "handlers", [logging.StreamHandler(said)])
    monkeypatch.setattr(doctor, "examine", lambda: logger.warning("No CUDA runtime is found") or doctor.Diagnosis(()))
    level = logger.level
    assert run("doctor").exit_code == 0
    assert said.getvalue() == ""
    assert logger.level == level


@pytest.mark.parametrize(("cuda", "said"), [(None, "none"), ("13.0", "none, though torch is built for CUDA 13.0")])
def test_doctor_tells_a_torch_without_cuda_from_a_machine_without_gpus(
    cuda: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (line,) = doctor._gpus()
    assert (line.state, "nvidia-smi" in line.advice) == (said, cuda is not None)
    monkeypatch.setattr(doctor, "_version", lambda name: None)
    assert {line.advice.rpartition(": ")[2] for line in doctor._optional()} >= {
        "pip install 'mcore-hf[peft]'",
        "pip install 'mcore-hf[te]'",
    }


@pytest.mark.parametrize("by_top_level", [True, False])
def test_doctor_names_a_distribution_with_our_import_name(
    tmp_path: Path, by_top_level: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished = _doctor(_installed(tmp_path, "mcore-bridge", by_top_level=by_top_level), monkeypatch)
    assert finished.exit_code == 1, finished.stdout
    said = " ".join(finished.stdout.split())
    assert "name clash mcore-bridge 1.6.5" in said
    assert "pip uninstall mcore-bridge mcore-hf" in said
    assert "not ready: name clash: " in said


def test_the_import_tells_of_a_distribution_with_our_import_name(tmp_path: Path) -> None:
    site = _installed(tmp_path / "site", "mcore-bridge", by_top_level=True)
    finished = subprocess.run(
        [sys.executable, "-c", "import mcore_bridge"],
        env={**os.environ, "PYTHONPATH": f"{Path(mcore_bridge.__file__).parent.parent}:{site}:/nothing"},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    assert f"{site} has the distribution mcore-bridge of ModelScope" in finished.stderr
    assert "pip uninstall mcore-bridge mcore-hf" in finished.stderr


def test_doctor_finds_nothing_wrong_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = _installed(tmp_path, "mcore-hf", by_top_level=False)  # under whatever spelling
    finished = _doctor(ours, monkeypatch)
    assert finished.exit_code == 0, finished.stdout
    for name in ("python", "torch", "megatron-core", "transformers", "GPUs"):
        assert name in finished.stdout
    assert finished.stdout.splitlines()[-1] == "ready"


@pytest.mark.parametrize(
    ("name", "version", "advice", "is_problem"),
    [
        ("transformers", "4.56.0", "too old", True),
        ("transformers", "4.57.1", "", False),
        ("transformers", "5.24.4", "", False),
        ("transformers", "6.0", "not tested", False),
        ("megatron-core", "0.15.3", "too old", True),
        ("megatron-core", "0.19.2+git1", "", False),
        ("megatron-core", "0.20.0rc1", "not tested", False),
        ("torch", "2.7.1", "not tested", False),
        ("python", "3.12.1", "", False),
        ("torch", "a-fork", "cannot be compared", False),
    ],
)
def test_doctor_judges_versions(name: str, version: str, advice: str, is_problem: bool) -> None:
    line = doctor._judged(name, version)
    assert line.advice.startswith(advice)
    assert bool(line.advice) == bool(advice)
    assert line.is_problem is is_problem


# text -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (153_400_000, "153 MB"),
        (6_380_000_000, "6.38 GB"),
        (10**18, "1000 PB"),
    ],
)
def test_bytes_as_people_read_them(value: int, said: str) -> None:
    assert text.num_bytes(value) == said


def test_logits_that_are_nan_are_called_so() -> None:
    found = Comparison(difference=float("nan"), scale=float("nan"), count=8)
    verdict: Any = SimpleNamespace(logits=found, task=SimpleNamespace(adapter=None))
    assert "WRONG" in report._logits(verdict)
    assert "some are NaN, as if a weight had numbers that are not finite" in report._logits(verdict)
