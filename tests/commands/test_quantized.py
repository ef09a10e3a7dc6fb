"""The command on quantized folders: ``verify``, and ``plan``, which reads their configs alone."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mcore_bridge.commands import text
from mcore_bridge.commands.verify.transformers_logits import why_no_reference
from tests import zoo
from tests.support import quantized
from tests.support.command import run
from tests.support.strategies import tiny
from tests.support.twins import read


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
    encoded = 28 * (2 if zoo.NEWEST else 3)
    assert f'published yes: {encoded} encoded tensors bit by bit with quantize="as_published", and all others' in said
    assert ("largest difference to transformers" if zoo.NEWEST else "does not dequantize") in said


@pytest.mark.parametrize(
    ("name", "form", "said"),
    [
        ("qwen3", quantized.deepseek((128, 128)), "decodes blocks at an edge otherwise, as those of .*_proj.weight"),
        ("qwen3", quantized.nvfp4("modelopt"), "does not read weights of modelopt"),
        ("qwen3", quantized.deepseek((8, 8)), "^$"),
        ("mistral4", quantized.stacks_with_one_scale(), "leaves out the scales of stacks .* as of .*experts.down_proj"),
    ],
)
@pytest.mark.skipif(not zoo.NEWEST, reason="transformers 4 decodes FP8 on GPUs alone")
def test_logits_are_left_out_where_transformers_has_none(
    name: str, form: quantized.Format, said: str, tmp_path: Path
) -> None:
    quantized.write(tiny(name, **dict(zoo.described()[name].fields)), form, tmp_path)
    assert re.search(said, why_no_reference(tmp_path))


def test_plan_takes_the_config_of_a_quantized_model(tmp_path: Path) -> None:
    quantized.write(tiny("qwen3"), quantized.deepseek((8, 8)), tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    result = run("plan", tmp_path, "--tp", 2)
    assert result.exit_code == 0, result.output


CUT = "is cut within 8 numbers whose codes lie together"
FORMS = {
    "gpt_oss": quantized.mxfp4(),
    "kimi_k2": quantized.int4(8),
    "qwen3": quantized.deepseek((8, 8)),
    "deepseek_v4": quantized.deepseek_v4(),
}
CASES = [("gpt_oss", "", []), ("kimi_k2", CUT, None), ("qwen3", "", 1), ("deepseek_v4", "", [])]


def config_of(name: str) -> Any:
    if name == "kimi_k2":
        return read(name, {**zoo.described()["deepseek_v3"].hf.to_dict(), "moe_intermediate_size": 24})
    sizes = {"hidden_size": 64, "intermediate_size": 32} if name in ("gpt_oss", "deepseek_v4") else {}
    return tiny(name, **{**zoo.described()[name].fields, **sizes})


@pytest.mark.parametrize(
    ("name", "left_out", "lost"), [case for case in CASES if case[0] in zoo.described() or case[0] == "kimi_k2"]
)
def test_codes_leave_as_published_where_the_mesh_lets_them(name: str, left_out: str, lost: Any, tmp_path: Path) -> None:
    """A plan counts their bytes. Codes beside a scale of zero, planted in one case, cannot come back.

    Names of DeepSeek V4's plain ``hc_attn_scale`` end like names of scales, and keep the dtype of the files.
    """
    files, _ = quantized.write(config_of(name), FORMS[name], tmp_path, dtype=torch.bfloat16)
    mesh = [tmp_path, "--tp", 2, *(("--etp", 2) if left_out else ())]
    if lost:
        files["model.layers.1.mlp.up_proj.weight_scale_inv"][1, 1] = 0
        lost = ["model.layers.1.mlp.up_proj.weight"]
        save_file(files, tmp_path / "model.safetensors", metadata={"format": "pt"})
    result = run("verify", *mesh, "--no-logits", "--json")
    found = json.loads(result.stdout)
    assert (found["good"], result.exit_code) == (not lost, int(bool(lost)))
    assert left_out in (found["encoded_left_out"] or "")
    assert bool(left_out) == bool(found["encoded_left_out"])
    assert found["encoded_different"] == lost
    assert found["different"] == []
    num_bytes = text.num_bytes(sum(tensor.nbytes for tensor in files.values()))
    planned = " ".join(run("plan", *mesh).output.split())
    assert (f'(quantize="as_published") it yields {num_bytes}; a rank receives' in planned) == (not left_out)
