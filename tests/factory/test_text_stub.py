"""The arguments with which transformers calls the language model of each composite. A change in transformers fails
here.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_bridge.factory.vision.deepstack import carried
from mcore_bridge.factory.vision.text_stub import TextStub, run_composite
from tests.support import composites, seeing, towers

PLAIN: dict[str, Any] = {"inputs_embeds": (1, "s", "h")}
THREE = {**PLAIN, "position_ids": (3, 1, "s")}
DEEP = {**THREE, "visual_pos_masks": (1, "s"), "deepstack_visual_embeds": [("n", "h"), ("n", "h")]}
BOTH_WAYS = {**PLAIN, "attention_mask": dict.fromkeys(("full_attention", "sliding_attention"), (1, 1, "s", "s"))}
EXPECTED: dict[str, Any] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "glm4v", "glm46v", "glm4v_moe"), THREE),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), DEEP),
    **dict.fromkeys(("internvl", "mistral3", "got_ocr2", "lighton_ocr", "llama4"), PLAIN),
    **dict.fromkeys(("llava", "llava_next", "llava_next_video", "llava_onevision", "vipllava"), PLAIN),
    "gemma3": BOTH_WAYS,
    "gemma4": {**BOTH_WAYS, "position_ids": (1, "s")},
    "hunyuan_vl": {**PLAIN, "position_ids": (4, 1, "s")},
    "exaone4_5": {**PLAIN, "position_ids": (1, "s")},
}
"""Shapes for s tokens, n of them for images, of size h. Masks of rows without padding are not passed."""


def called_with(model_type: str, folder: Path) -> dict[str, Any]:
    """The shapes of the tensors in the call, for the first row of a batch."""
    model = seeing.reference(seeing.written(model_type, folder))
    ids, mask, images = seeing.batch_of(model)
    row = ids[:1, mask[0].bool()]
    inputs = seeing._inputs(model, row, images[0])
    base, size = composites.base_of(model), model.config.text_config.hidden_size
    base.language_model = TextStub(base.language_model)
    known = {name: value for name, value in inputs.items() if name not in ("input_ids", "attention_mask")}
    with torch.no_grad():
        call = run_composite(base, lambda ids: torch.zeros(*ids.shape, size), {}, input_ids=row, **known)
    names = {row.size(1): "s", size: "h", int((seeing.token_types(model.config, row) > 0).sum()): "n"}
    return {name: _shape(value, names) for name, value in call.items() if _shape(value, names) is not None}


def _shape(value: Any, names: dict[int, str]) -> Any:
    if isinstance(value, Tensor):
        return tuple(names.get(each, each) for each in value.shape)
    if isinstance(value, dict):
        return {name: _shape(each, names) for name, each in value.items()}
    return [_shape(each, names) for each in value] if isinstance(value, list) else None


@pytest.mark.parametrize("name", EXPECTED)
def test_transformers_calls_its_language_model_with(name: str, tmp_path: Path) -> None:
    if name not in towers.NAMES:
        pytest.skip("the installed transformers does not build its tower")
    assert called_with(name, tmp_path) == EXPECTED[name]


def test_layers_get_features_as_leaves_so_that_each_recomputed_layer_does_not_run_the_tower_backward() -> None:
    hidden, weight = torch.zeros(2, 1, 3, requires_grad=True), torch.ones(2, 1, 3, requires_grad=True)
    output, held = carried(hidden, [weight * 2, weight * 3])
    assert all(feature.is_leaf and feature.requires_grad for feature in held.features)
    for number, feature in enumerate(held.features):
        (feature * (number + 1)).sum().backward()
    assert weight.grad is None
    output.sum().backward()
    assert weight.grad is not None
    assert weight.grad.eq(2 * 1 + 3 * 2).all()
    with torch.no_grad():
        made = [weight * 2]
        assert carried(hidden, made)[1].features is made
