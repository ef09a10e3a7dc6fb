"""HF folders to checkpoints of megatron-core and back: the same bits, whoever wrote them, and however often."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_bridge.commands.convert import convert
from mcore_bridge.weights.checkpoint import Checkpoint
from tests import zoo
from tests.strategies import random_state, save


def quiet(rank: int, phase: str, done: int, total: int) -> None:
    """Nobody looks on."""


def written(state: dict[str, torch.Tensor], hf: Any, folder: Path) -> Path:
    folder.mkdir()
    save(state, hf, folder)
    return folder


def assert_exact(folder: Path, state: dict[str, torch.Tensor]) -> None:
    found = Checkpoint(folder)
    assert set(found) == set(state)
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("name", zoo.cases())
def test_every_family_comes_back(name, tmp_path):
    hf = zoo.cases()[name].hf
    state = random_state(hf, dtype=torch.bfloat16)
    source = written(state, hf, tmp_path / "hf")
    convert(source, tmp_path / "dist", file_bytes=20_000, on_event=quiet)
    convert(tmp_path / "dist", tmp_path / "back", file_bytes=30_000, on_event=quiet)
    assert_exact(tmp_path / "back", state)
    assert not list(tmp_path.glob(".*"))
