"""Planted mistakes in models of text and images: the comparison with transformers must detect each mistake."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

import mcore_bridge as mb
from mcore_bridge.errors import BatchError
from mcore_bridge.factory.vision import image_hook as hook
from mcore_bridge.factory.vision.deepstack import LayerFeatures
from mcore_bridge.launch.fake_rank import rank_of
from tests.support import composites, pool, seeing
from tests.support.bounds import ONE
from tests.support.seeing import BOUND, case

pytestmark = pytest.mark.skipif("qwen3_5" not in composites.NAMES, reason="the installed transformers lacks it")


def probabilities_before_top_k(chunk: Any) -> None:
    chunk.config.moe_router_pre_softmax = True


def sections_of(model_type: str, chunk: Any) -> None:
    """Sections are in the order of another family."""
    other = composites.model_class(model_type)(composites.config(model_type)).model.language_model.rotary_emb
    rope = chunk.rotary_pos_emb
    rope.recompose = partial(type(other).recomposition_frequencies, rope.recompose.__self__)


def axes(order: Sequence[int], chunk: Any) -> None:
    """Exchange time, height and width; or use time in the place of all three, as in a text."""
    rope, right = chunk.rotary_pos_emb, chunk.rotary_pos_emb.recompose
    rope.recompose = lambda angles: right(angles[[*order]])


def length_of_the_longest(chunk: Any) -> None:
    """All sequences of a pack have the frequencies of the longest one."""
    right = chunk.rotary_pos_emb.frequencies
    chunk.rotary_pos_emb.frequencies = lambda lengths: right([max(lengths)] * len(lengths))


def features_a_layer_late(chunk: Any) -> None:
    for layer in chunk.decoder.layers:
        layer.layer_number -= 1
    chunk.decoder.layers[0].layer_number = 3  # which has no feature


def second_image_before_the_first(chunk: Any) -> None:
    """Exchange the images of the first row, which have 4 and 3 features."""

    def hooked(module: Any, args: Any, output: Any) -> None:
        features = output.pooler_output
        output.pooler_output = torch.cat([features[4:7], features[:4], features[7:]])

    chunk.vision.visual.register_forward_hook(hooked)


def images_from_left_to_right(chunk: Any) -> None:
    chunk.vision.config.text_config.use_bidirectional_attention = None


def images_both_ways_in_full_layers(chunk: Any) -> None:
    for layer in chunk.decoder.layers:
        layer.self_attention.core_attention.window_size = (4, 0)


LOG_PROBS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "top-k not normalised, Qwen3.5": ("qwen3_5_moe", probabilities_before_top_k),
    "top-k not normalised, Qwen3-VL": ("qwen3_vl_moe", probabilities_before_top_k),
    "contiguous sections": ("qwen3_vl", partial(sections_of, "qwen2_5_vl")),
    "interleaved sections": ("qwen2_5_vl", partial(sections_of, "qwen3_vl")),
    "height for width, interleaved": ("qwen3_vl", partial(axes, (0, 2, 1))),
    "height for width, contiguous": ("qwen2_5_vl", partial(axes, (0, 2, 1))),
    "position for width, of four": ("hunyuan_vl", partial(axes, (1, 0, 2, 3))),
    "rope of a text": ("qwen3_5", partial(axes, (0, 0, 0))),
    "the length of the longest": ("qwen3_vl dynamic", length_of_the_longest),
    "deepstack a layer late": ("qwen3_vl", features_a_layer_late),
    "images from left to right": ("gemma4", images_from_left_to_right),
    "images from left to right, unified": ("gemma4_unified", images_from_left_to_right),
    "images both ways in full layers": ("gemma4", images_both_ways_in_full_layers),
    "image 2 at image 1": ("qwen2_5_vl", second_image_before_the_first),
}


@pytest.mark.parametrize("name", LOG_PROBS)
def test_killed_by_log_probs(name: str) -> None:
    """Each mistake changes log-probs by more than 50 times the bound. Without a mistake they are right."""
    family, plant = LOG_PROBS[name]
    folder, (ids, mask, images, wanted), _ = case(family)
    errors = []
    with rank_of(ONE, 0, 1), torch.no_grad():
        models = seeing.built(folder, ONE)
        for change in (lambda chunk: None, plant):
            change(models[0])
            found = mb.forward(models, ids, mask, images=images).log_probs
            errors.append(float(((found - wanted) * (wanted != 0)).abs().max() / wanted.std()))
    assert errors[0] < BOUND < errors[1] / 50, errors


def own_slice(chunk: Any, own: Tensor) -> Tensor:
    """The tokens of this rank. The gradients of other tokens are lost."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    return own.transpose(0, 1).chunk(2)[rank].contiguous()


def of_constants(hidden: Tensor, features: Sequence[Tensor]) -> tuple[Tensor, LayerFeatures]:
    return hidden, LayerFeatures([feature.detach() for feature in features])


GRADIENTS: dict[str, tuple[str, Any]] = {
    "nothing": ("_hidden", hook._hidden),
    "a slice of SP without a gather": ("_hidden", own_slice),
    "a tower that is frozen": ("run_composite", torch.no_grad()(hook.run_composite)),
    "features of deepstack as constants": ("carried", of_constants),
}


def steps(folder: Path, batch: Any) -> list[Any]:
    """Runs in each worker: a step with each mistake."""
    found = []
    for name, wrong in GRADIENTS.values():
        with mock.patch.object(hook, name, wrong):
            found.append(seeing.step(folder, {"tp": 2, "sp": True}, batch))
    return found


def test_killed_by_gradients() -> None:
    """Mistakes that change gradients, but not log-probs."""
    folder, batch, wanted = case("qwen3_vl")
    found = zip(*pool.run(2, steps, folder, batch), strict=True)
    for name, ranks in zip(GRADIENTS, found, strict=True):
        problems = seeing.problems(list(ranks), wanted, BOUND)
        assert bool(problems) == (name != "nothing"), (name, problems)
        assert not any("log-probs" in problem for problem in problems), (name, problems)


@pytest.mark.parametrize("off_by", [-1, 1])
def test_an_image_token_that_is_off_by_one_is_refused(off_by: int) -> None:
    """It raises also if the caller marks the tokens of images: transformers would put features into wrong places."""
    folder, (ids, mask, images, _), _ = case("qwen3_vl")
    told = [
        each and {**each, "mm_token_type_ids": (ids == 5)[row] + 2 * (ids == 6)[row]} for row, each in enumerate(images)
    ]
    with rank_of(ONE, 0, 1), torch.no_grad():
        models = seeing.built(folder, ONE)
        mb.forward(models, ids, mask, images=told)
        models[0].vision.config.image_token_id += off_by
        with pytest.raises(BatchError, match=r"found in row 0: 0 tokens for images that have .* Do not cut rows"):
            mb.forward(models, ids, mask, images=images)
        with pytest.raises(BatchError, match=r"found in row 0: 0 tokens for images that have .* Do not cut rows"):
            mb.forward(models, ids, mask, images=told)
