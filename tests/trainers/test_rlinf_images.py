"""RLinf's training step on images, by the functions of RLinf's worker: the loss and gradients of transformers.

Runs if RLinf 0.3.0 or newer is found; its wheel without dependencies is enough.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_bridge.factory.hybrid_support import RELEASE
from tests.support import composites, pool, seeing
from tests.workers import rlinf_images

pytestmark = [
    pytest.mark.skipif(not rlinf_images.is_installed(), reason="RLinf is not installed"),
    pytest.mark.skipif("qwen3_vl" not in composites.NAMES, reason="the installed transformers lacks it"),
]
LAYOUT: Any = [[3, (1, 4, 4), 4, (1, 2, 6), 5], [14], [1, (1, 4, 2), 9], [2, (1, 2, 2), 7]]
ANSWER, SIZE, BOUND = 3, 2, 3e-5
"""Tokens of an answer, rows of a microbatch, and the largest difference beside the largest value."""


def batch_of(model: Any) -> dict[str, Any]:
    """Rows with padding on the left, and the mask of prompts."""
    ids, mask, images = seeing.batch_of(model, LAYOUT)
    for row, shown in enumerate(mask.bool()):
        own = ids[row, shown]
        ids[row], mask[row] = 0, 0
        ids[row, -len(own) :], mask[row, -len(own) :] = own, 1
    answer = torch.zeros_like(mask, dtype=torch.bool)
    answer[:, -ANSWER:] = True
    return {"prompt": ids, "attention_mask": mask, "label_mask": ~answer, "images": images}


def expected(model: Any, batch: dict[str, Any]) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Computed by transformers: the part of the mean loss of each microbatch, like megatron-core's, and the
    gradients.
    """
    losses = []
    for row, shown in enumerate(batch["attention_mask"].bool()):
        ids = batch["prompt"][row : row + 1, shown]
        logits = model(**seeing._inputs(model, ids, batch["images"][row])).logits[0, -ANSWER - 1 : -1]
        losses.append(torch.nn.functional.cross_entropy(logits, ids[0, -ANSWER:]))
    each = torch.stack(losses).view(-1, SIZE).mean(1)
    each.mean().backward()
    grads = {
        name: parameter.grad
        for name, parameter in model.model.named_parameters()
        if not name.startswith("language_model.") and parameter.grad is not None
    }
    return list(each.detach() / len(each)), grads


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_vl"])
def test_a_step_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    folder = seeing.written(name, tmp_path)
    model = seeing.reference(folder)
    batch = batch_of(model)
    losses, grads = expected(model, batch)
    for sizes in ({"tp": 2, "sp": True}, {"pp": 2}):
        ranks = pool.run(2, rlinf_images.step, str(folder), sizes, batch, SIZE)
        found = next(each for each, _ in ranks[::-1] if each)
        assert max(float((a - b).abs()) for a, b in zip(found, losses, strict=True)) < BOUND
        for _, tower in ranks:
            for parameter, gradient in grads.items() if tower else ():
                size = grads[parameter.replace("k_proj.bias", "k_proj.weight")].abs().max()
                assert float((tower[parameter] - gradient).abs().max() / size) < BOUND, (sizes, parameter)
        assert any(tower for _, tower in ranks)


@pytest.mark.skipif(not RELEASE.is_installed, reason="the installed megatron-core has no HybridModel")
def test_a_step_of_a_hybrid_model_has_the_bits_of_a_gpt_model(tmp_path: Path) -> None:
    """Parameters of the text only, for microbatches without images."""
    folder = seeing.written("qwen3_vl", tmp_path)
    batch = batch_of(seeing.reference(folder))
    batch["prompt"] = batch["prompt"].masked_fill(batch["prompt"] == seeing.SPECIAL["image_token_id"], seeing.FIRST)
    batch["images"] = [None] * len(batch["images"])
    for sizes in ({"tp": 2, "sp": True}, {"pp": 2}):
        ranks = [pool.run(2, rlinf_images.step, str(folder), sizes, batch, SIZE, model) for model in ("gpt", "hybrid")]
        for (losses, grads), (others, changed) in zip(*ranks, strict=True):
            assert all(map(torch.equal, losses, others))
            assert grads.keys() == changed.keys() != set()
            assert all(torch.equal(gradient, changed[name]) for name, gradient in grads.items())
            assert any(bool(gradient.any()) for gradient in grads.values())
