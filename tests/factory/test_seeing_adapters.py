"""Adapters of a text beside a frozen tower: ``peft``'s log-probs and gradients for rows with images."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

import mcore_bridge as mb
from mcore_bridge.errors import ConfigError
from mcore_bridge.launch.fake_rank import rank_of
from tests.support import composites, pool, seeing, seeing_adapters
from tests.support.bounds import ONE

pytestmark = pytest.mark.skipif("qwen3_5" not in composites.NAMES, reason="the installed transformers lacks it")
BOUND = 3e-5
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
CASES: dict[str, list[Any]] = {
    "qwen3_vl": [({"tp": 2, "sp": True}, {"overrides": RECOMPUTED}), ({"cp": 2}, {"bare": True})],
    "gemma3": [({"pp": 2}, {})],
    "gemma4": [({"pp": 2}, {})],
}
"""For each family, meshes of two ranks, with options of ``build_model``."""


@cache
def written(name: str) -> Path:
    return seeing.written(name, Path(mkdtemp()))


def ends(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors by the ends of names, from the layer on: prefixes differ between gemma3's files and transformers'
    module.
    """
    return {name.partition("layers.")[2]: tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", CASES)
def test_a_step_with_images_is_that_of_peft(name: str, tmp_path: Path) -> None:
    folder = written(name)
    pool.run(1, seeing_adapters.made, folder, tmp_path)
    batch = seeing.batch_of(seeing.reference(folder))
    log_probs, grads = seeing_adapters.expected(folder, tmp_path, batch)
    for found in zip(
        *pool.run(2, seeing_adapters.steps, folder, tmp_path, CASES[name], (*batch, log_probs)), strict=True
    ):
        for step in found:
            assert float((step["log_probs"] - log_probs).abs().max()) < BOUND
            own, wanted = ends(step["grads"]), ends(grads)
            assert own.keys() == wanted.keys()
            wrong = {n: float((own[n] - wanted[n]).abs().max() / wanted[n].abs().max()) for n in wanted}
            assert max(wrong.values()) < BOUND, wrong


def test_a_tower_has_no_adapters_and_is_not_trained_beside_some() -> None:
    with rank_of(ONE, 0, 1):
        chunks = seeing.built(written("qwen3_vl"), ONE)
        with pytest.raises(ConfigError, match='adapters freeze all other parameters: build with vision="frozen"'):
            mb.add_adapters(chunks, rank=1, alpha=1, targets=["q_proj"])
        chunks = seeing.built(written("qwen3_vl"), ONE, vision="frozen")
        with pytest.raises(ConfigError, match=r"'attn\.proj' is a layer of MTP or of a model of images"):
            mb.add_adapters(chunks, rank=1, alpha=1, targets=["attn.proj", "q_proj"])
        made = mb.add_adapters(chunks, rank=1, alpha=1, targets=["linear_fc1"])  # a tower has this name, too
        assert all(name.startswith("decoder.") for name in made.names)
