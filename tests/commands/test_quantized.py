"""The command on quantized folders: ``verify``, and ``plan``, which reads their configs alone."""

import re
from pathlib import Path

import pytest
import torch

from mcore_bridge.commands.verify.transformers_logits import why_no_reference
from tests import zoo
from tests.support import quantized
from tests.support.command import run
from tests.support.strategies import tiny


def test_verify_compares_with_what_files_decode_to(tmp_path: Path) -> None:
    form = quantized.deepseek((8, 8)) if zoo.NEWEST else quantized.ministral()
    quantized.write(tiny("qwen3"), form, tmp_path / "quantized", dtype=torch.bfloat16)
    result = run("verify", tmp_path / "quantized", "--tp", 2, "--save", tmp_path / "saved")
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert "in 47 tensors, 28 of them decoded from fp8 " in said
    assert "exact yes: 47 tensors bit by bit, on all 2 ranks" in said
    assert re.search(r"build \d+\.\d+, load \d\d?\d?\.\d+, export", said)  # durations, not seconds since boot
    assert "saved yes: 47 tensors bit by bit" in said
    assert ("largest difference to transformers" if zoo.NEWEST else "does not dequantize") in said


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (quantized.deepseek((128, 128)), "decodes blocks at an edge otherwise, as those of .*_proj.weight"),
        (quantized.nvfp4("modelopt"), "does not read weights of modelopt"),
        (quantized.deepseek((8, 8)), "^$"),
    ],
)
@pytest.mark.skipif(not zoo.NEWEST, reason="transformers 4 decodes FP8 on GPUs alone")
def test_logits_are_left_out_where_transformers_has_none(form: quantized.Format, said: str, tmp_path: Path) -> None:
    quantized.write(tiny("qwen3"), form, tmp_path)
    assert re.search(said, why_no_reference(tmp_path))


def test_plan_takes_the_config_of_a_quantized_model(tmp_path: Path) -> None:
    quantized.write(tiny("qwen3"), quantized.deepseek((8, 8)), tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    result = run("plan", tmp_path, "--tp", 2)
    assert result.exit_code == 0, result.output
