"""The benchmarks of exports and files run on two ranks without GPUs, and print the lines that results consist of."""

import contextlib
import importlib
import io
import json
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support import pool, towers

FOLDER = Path(__file__).parent.parent.parent / "benchmarks"


def printed(script, arguments):
    """The output of a benchmark on this rank, in an existing process group instead of a new one.

    The small models have a smaller vocabulary, which is most of their weights.
    """
    known, out = {*sys.modules}, io.StringIO()
    with (
        mock.patch.object(sys, "argv", [script, "--device", "cpu", *arguments]),
        mock.patch.object(sys, "path", [str(FOLDER), *sys.path]),
        mock.patch.object(dist, "destroy_process_group"),  # by who made it
        contextlib.redirect_stdout(out),
        contextlib.ExitStack() as changed,
    ):
        for name in ("tiny", "tiny-moe"):
            changed.enter_context(mock.patch.dict(importlib.import_module("common").MODELS[name], vocab_size=1024))
        runpy.run_path(str(FOLDER / script), run_name="__main__")
    for name in ("common", "export"):  # other modules may have these names, too
        if name not in known:
            sys.modules.pop(name, None)
    return out.getvalue()


SETS = ["--sets", "8", "--tokens", "64", "--turns", "1"]


@pytest.mark.parametrize(
    ("script", "arguments", "seconds"),
    [
        ("export.py", ["tiny pp=2", "--repeats", "2"], ("first_s", "median_s")),
        ("reshard.py", ["tiny-moe layers=1 ep=2 to tp=2", "--repeats", "2"], ("first_s", "median_s", "raw_s")),
        ("load.py", ["--tp", "2", "--layers", "1", "--repeats", "2"], ("load", "raw")),
        ("save.py", ["--tp", "2", "--layers", "1", "--repeats", "2"], ("save", "export", "raw")),
        ("adapters.py", ["tiny-moe layers=1 tp=2 sp=1 ep=2", *SETS, "--repeats", "2"], ("one_s", "rows_s")),
    ],
)
def test_a_benchmark_runs_and_prints_a_ratio(script, arguments, seconds, tmp_path):
    folder = ["--folder", str(tmp_path)] if script in ("load.py", "save.py") else []
    first, second = pool.run(2, printed, script, [*arguments, *folder])
    found = json.loads(first.splitlines()[-1])
    assert found["ratio"] > 0
    for name in seconds:
        assert (found[name]["median_s"] if isinstance(found[name], dict) else found[name]) > 0
    assert not second


OURS = ["--only", "ours", "--turns", "1", "--repeats", "1"]


@pytest.mark.skipif("qwen3_vl" not in towers.NAMES, reason="the installed transformers is too old")
def test_a_step_with_images_is_timed():
    said, _ = pool.run(2, printed, "vision.py", ["tiny-vl layers=1 tp=2 sp=1", *OURS, "--tokens", "32", "--grid", "4"])
    (line,) = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert line["image_tokens"] == 3 * 2 * 2
    assert line["tokens_s"] > 0


def test_steps_and_exports_with_adapters_are_timed():
    asked = [*OURS, "--tokens", "16"]
    said, _ = pool.run(2, printed, "adapters.py", ["tiny-moe layers=1 tp=2 sp=1 ep=2", *asked])
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert [(line["measure"], line.get("merged")) for line in lines] == [
        *(("step", None), ("export", False), ("export", True)),
    ]
    assert all(line["median_s"] > 0 for line in lines)
    assert lines[0]["tokens_s"] > 0


def test_quantized_folders_are_loaded_beside_bf16(tmp_path):
    only = ["--only", "qwen3-30b-a3b bf16", "gpt-oss-20b mxfp4"]
    arguments = ["--size", "tiny", "--repeats", "1", "--folder", str(tmp_path), *only]
    (out,) = pool.run(1, printed, "quantized_load.py", arguments)
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert [line["model"] for line in lines] == only[1:]
    assert all(line["load"]["median_s"] > 0 for line in lines)


def test_the_benchmark_of_engines_compares_every_bit():
    case = "tiny-moe layers=1 tp=2 ep=2 sp=1"
    said, _ = pool.run(2, printed, "engine.py", [case, "--repeats", "1", "--slow-repeats", "1"])
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    found = {line["what"]: line for line in lines}
    assert found["bits, ring"]["parameters"] > 10
    assert not found["bits, ring"]["differing"]
    assert not found["map"]["uncovered"]
    assert found["sync, map"]["median_s"] > 0
    assert "expected memory of a CUDA device" in found["direct"]["refused"]


@pytest.mark.multigpu
def test_an_engine_on_another_gpu_than_its_trainer_gets_every_bit_in_all_ways():
    """The process of the engine does not make its GPU the current one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    command = [sys.executable, str(FOLDER / "engine.py"), "tiny-moe", "--engine-device", "cuda:1"]
    finished = subprocess.run([*command, "--repeats", "2", "--slow-repeats", "1"], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    lines = [json.loads(line) for line in finished.stdout.splitlines() if line.startswith("{")]
    bits = {line["what"]: line for line in lines if line["what"].startswith("bits")}
    assert {*bits} == {"bits, ring", "bits, direct", "bits, shards"}
    assert not any(line["differing"] for line in bits.values())
    assert all(line["parameters"] > 10 for line in bits.values())


def test_quantizers_are_compared_bit_by_bit(monkeypatch):
    """Ours beside itself has no difference, and a scale that is a bit larger is seen, with the codes that it moves."""
    monkeypatch.syspath_prepend(FOLDER)
    quantizers = runpy.run_path(str(FOLDER / "quantizers.py"))
    ours, weight = quantizers["ours"], quantizers["weights"]("cpu")["zeros"]
    own = quantizers["compared"](ours, ours, weight)
    assert own["scales_differ"] == own["codes_differ"] == 0
    assert 0 < own["error"] == own["our_error"] < 1 / 16

    def shifted(weight):
        codes, scales = ours(weight)
        scales[0, 1] *= 1.5
        return codes, scales

    other = quantizers["compared"](shifted, ours, weight)
    assert (other["scales_differ"], other["codes_differ"]) == (1, 0)
    assert other["error"] > 0.4
