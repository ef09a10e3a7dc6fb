"""``draw``: every model that transformers builds gets distinct weights; a folder that has weights is not changed."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mcore_bridge.commands.random_values import drawn, is_flat, varied
from tests import zoo
from tests.support import tiny
from tests.support.command import refused, run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "begun",
    [
        torch.ones(64),
        torch.zeros(96),
        torch.zeros(1),
        torch.arange(1.0, 17).log(),
        torch.ones(8, 1),
        torch.randn(24, 16),
        torch.full((80,), 5.0),
    ],
)
def test_values_are_neither_zero_nor_one_and_all_different(begun: torch.Tensor, dtype: torch.dtype) -> None:
    one, other = (drawn(name, begun.to(dtype)) for name in ("one", "other"))
    assert one.dtype == dtype
    assert one.shape == begun.shape
    assert not ((one == 0) | (one == 1)).any()
    assert (one == other).double().mean() < 0.1
    assert one.unique().numel() == one.numel()
    assert torch.equal(one, drawn("one", begun.to(dtype)))
    assert not torch.equal(one, drawn("one", begun.to(dtype), seed=1))
    assert begun.numel() == 1 or not is_flat(one)


def test_a_change_keeps_signs_and_what_is_not_flat() -> None:
    scales = torch.tensor([1e-5, 2.0, 0.0, -3.0])
    changed = varied("name", scales)
    assert not (changed == scales).any()
    assert torch.equal(changed.sign()[[0, 1, 3]], scales.sign()[[0, 1, 3]])
    assert not is_flat(scales)
    assert is_flat(torch.full((4,), 1e-4))
    assert is_flat(torch.tensor([1.0, 1.0078]))
    assert varied("name", torch.empty(0, 3)).shape == (0, 3)


@pytest.mark.parametrize("name", sorted({"gpt_oss", "nemotron_h", "qwen3_next"} & zoo.cases().keys()))
def test_what_is_drawn_verifies(name: str, tmp_path: Path) -> None:
    zoo.cases()[name].hf.save_pretrained(tmp_path)
    assert run("draw", tmp_path / "config.json", tmp_path, "--seed", 3).exit_code == 0
    tensors = load_file(tmp_path / "model.safetensors")
    assert not [key for key, value in tensors.items() if ((value == 0) | (value == 1)).any()]
    result = run("verify", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["logits"]["varied"] == []
    message = refused(run("draw", tmp_path, tmp_path))
    assert "must have no weights, found model.safetensors: name another folder" in message
    assert load_file(tmp_path / "model.safetensors").keys() == tensors.keys()


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    hf = tiny.config("qwen3")
    hf.save_pretrained(tmp_path)
    (tmp_path / "other.json").write_text("{}")
    tiny.config("qwen3", vocab_size=10**12).save_pretrained(tmp_path / "large")
    large = run("draw", tmp_path / "large", tmp_path / "out")
    assert "drawing 96" in large.stderr
    assert re.search(
        r"needs \d+ TB of memory and of disk, found only .* of memory and .* of the disk of", refused(large)
    )
    assert "Rename it" in refused(run("draw", tmp_path / "other.json", tmp_path / "out"))
    assert "neither" in refused(run("draw", tmp_path / "none", tmp_path / "out"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "albert"}))
    assert "found none for 'albert'" in refused(run("draw", tmp_path, tmp_path / "out"))
    assert not (tmp_path / "out").exists()
