"""Folders to convert, and their comparison."""

from pathlib import Path
from typing import Any

import torch

from mcore_bridge.weights.files.hf_folder import Checkpoint
from tests.support.strategies import random_state, save, tiny

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "num_key_value_heads": 2}


def quiet(rank: int, phase: str, done: int, total: int) -> None:
    """Ignore progress."""


def written(state: dict[str, torch.Tensor], hf: Any, folder: Path) -> Path:
    folder.mkdir()
    save(state, hf, folder)
    return folder


def assert_exact(folder: Path, state: Any) -> None:
    found = Checkpoint(folder)
    assert set(found) == set(state)
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def small(folder: Path, **fields: Any) -> Path:
    """A checkpoint with experts and an odd vocabulary, in bf16."""
    hf = tiny("qwen3_moe", vocab_size=97, **{**MOE, **fields})
    return written(random_state(hf, dtype=torch.bfloat16), hf, folder)


class StoppedError(Exception):
    """Somebody stops the conversion."""


def stop_half_way(rank: int, phase: str, done: int, total: int) -> None:
    """The reports of a conversion, until it is stopped."""
    if done > total / 2:
        raise StoppedError


def mb_config(folder: Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder)
