"""Images of each row: an input that does not fit is named on all ranks, and one mapping for all rows is split."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mcore_bridge as mb
from mcore_bridge.batches.image_rows import _dealt, _parted, _parts, images_of_rows
from mcore_bridge.batches.images import joined, token_types
from mcore_bridge.errors import BatchError
from mcore_bridge.launch.fake_rank import rank_of
from tests.support import composites, pool, seeing, stepping
from tests.support.bounds import ONE

pytestmark = pytest.mark.skipif("qwen3_5" not in composites.NAMES, reason="the installed transformers lacks it")
FAMILIES = [
    "qwen3_vl",
    "qwen2_5_vl",
    "hunyuan_vl",
    "internvl",
    "mistral3",
    "gemma3",
    "llama4",
    "llava_onevision",
    "gemma4",
]
Rows = list[Any]
PP = {"pp": 2}


def _moved(images: Rows) -> Rows:
    """One patch of the first row has gone to the last one."""
    first, last = images[0]["pixel_values"], images[3]["pixel_values"]
    return [
        {**images[0], "pixel_values": first[:-1]},
        *images[1:3],
        {**images[3], "pixel_values": torch.cat([first[-1:], last])},
    ]


def _without(images: Rows, *names: str, row: int = 3) -> Rows:
    kept = {name: value for name, value in images[row].items() if name not in names}
    return [*images[:row], kept, *images[row + 1 :]]


def _with(images: Rows, row: int = 3, **values: Any) -> Rows:
    return [*images[:row], {**(images[row] or {}), **values}, *images[row + 1 :]]


WRONG: dict[str, Callable[[Rows], Any]] = {
    "row 3: 2 tokens that stand for images, and no pixel_values": lambda rows: _without(rows, "pixel_values"),
    "row 3: 2 tokens .* and no pixel_values: give": lambda rows: _with(rows, pixel_values=None),
    "row 3: 2 .* and no pixel_values": lambda rows: _with(rows, pixel_values=rows[3]["pixel_values"][:0]),
    "row 3: 2 tokens that stand for images, .* 0 there$": lambda rows: [*rows[:3], None],
    "row 0: 7 .*; in row 2: .* no pixel_values_videos: .*; in row 3: 2 tokens": lambda rows: None,
    "row 0: 7 tokens .*; in row 2: 1 tokens": lambda rows: [None] * 4,
    "row 0: 27 patches, where image_grid_thw has 28: .*; in row 3: 9 patches": _moved,
    "row 2: videos, and none as video_grid_thw": lambda rows: _without(rows, "video_grid_thw", row=2),
    "row 3: images, and none as image_grid_thw": lambda rows: _without(rows, "image_grid_thw"),
    "row 3: images, .* numbers of shape .* as image_grid": lambda rows: _with(rows, image_grid_thw=torch.ones(3)),
    "row 1: images, and no tokens that stand for them": lambda rows: [rows[0], rows[3], *rows[2:]],
    "pixel_values must be a tensor, found a Tensor in row 3": lambda rows: _with(rows, pixel_values=torch.ones(())),
    "must be a list with a mapping .* found str": lambda rows: "images",
    "must be a list with a mapping .* found int": lambda rows: 3,
    "a mapping of inputs or None for each row, found Tensor in row 0": lambda rows: [torch.ones(1)] * 4,
    r"inputs that the model reads, found \['input_ids'\] in the mapping": lambda rows: {
        **joined(rows),
        "input_ids": torch.ones(1),
    },
    "images of a batch must fit its tokens, found 3 for": lambda rows: joined([*rows[:3], None]),
    r"pixel_values of a batch must have an entry for each of 40 patches or frames, found \(39,": lambda rows: {
        **joined(rows),
        "pixel_values": joined(rows)["pixel_values"][1:],
    },
}


def _said(forward: Callable[[], Any]) -> str:
    try:
        forward()
    except BatchError as error:
        return str(error)
    return ""


def wrong_rows(folder: Path, batch: Any, sizes: dict[str, int]) -> list[str]:
    """Runs in each worker: the outcome of each case of ``WRONG``. All ranks make all calls."""
    ids, mask, images, _ = batch
    dims = mb.ParallelDims(**sizes)
    with stepping.mesh(dims):
        chunks = seeing.built(folder, dims)
        said = [
            _said(lambda wrong=wrong: mb.forward(chunks, ids, mask, images=wrong(images))) for wrong in WRONG.values()
        ]
        mb.forward(chunks, ids, mask, images=images)
        return said


@pytest.mark.parametrize("sizes", [{}, PP, {"cp": 2}], ids=str)
def test_images_that_do_not_fit_their_row_are_named_on_every_rank(sizes: dict[str, int]) -> None:
    """Images are checked also if a row is alone in its microbatch, which is the default on a pipeline."""
    folder, batch, _ = seeing.case("qwen3_vl")
    for said in pool.run(max([1, *sizes.values()]), wrong_rows, folder, batch, sizes, timeout=60):
        for words, message in zip(WRONG, said, strict=True):
            with pytest.raises(BatchError, match=words):
                raise BatchError(message)


@pytest.mark.parametrize("name", ["mistral3", "llava_onevision"])
def test_a_row_has_one_size_for_each_image(name: str) -> None:
    """With one image too many, the later rows of a microbatch would get the images before theirs."""
    folder, (ids, mask, images, _), _ = seeing.case(name)
    twice = _with(images, 0, pixel_values=torch.cat([images[0]["pixel_values"]] * 2))
    config = seeing.reference(folder).config
    readable = frozenset(("pixel_values", "image_sizes", "pixel_values_videos"))
    images_of_rows(images, ids, mask.bool(), config, readable)
    with pytest.raises(BatchError, match="in row 0: 4 images, where image_sizes has 2: give each row its own"):
        images_of_rows(twice, ids, mask.bool(), config, readable)


def other_images(folder: Path, batch: Any, sizes: dict[str, int]) -> list[str]:
    """Runs in each of two workers; the second has other images than the first."""
    ids, mask, images, _ = batch
    dims = mb.ParallelDims(**sizes)
    types = token_types(seeing.reference(folder).config, ids)
    noisy = [each and {**each, "pixel_values": each["pixel_values"] + 1e-3} for each in images]
    typed = [each and {**each, "mm_token_type_ids": types[row]} for row, each in enumerate(images)]
    with stepping.mesh(dims):
        chunks = seeing.built(folder, dims)
        is_second = torch.distributed.get_rank() == 1
        others = [None, noisy, typed, [images[3], *images[1:3], images[0]], images[:3], {}]
        said = [
            _said(lambda other=other: mb.forward(chunks, ids, mask, images=other if is_second else images))
            for other in others
        ]
        mb.forward(chunks, ids, mask, images=images)
        return said


@pytest.mark.parametrize("sizes", [PP, {"tp": 2}], ids=str)
def test_ranks_of_a_replica_that_have_other_images_all_raise(sizes: dict[str, int]) -> None:
    folder, batch, _ = seeing.case("qwen3_vl")
    first, second = pool.run(2, other_images, folder, batch, sizes, timeout=60)
    assert all(first), first
    assert all(second), second
    differ = "expected the same images on every rank, found rank 0 of the job: images="
    assert [differ in each for each in first] == [False, True, True, True, False, False]
    assert ["refuses its own, rank 1 of the job: " in each for each in first] == [True, False, False, False, True, True]


def two_forms(folder: Path, batch: Any, sizes: dict[str, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Runs in each worker: log-probs with a list for rows, with one mapping, and with one mapping that has types."""
    ids, mask, images, _ = batch
    dims = mb.ParallelDims(**sizes)
    with stepping.mesh(dims), torch.no_grad():
        chunks = seeing.built(folder, dims)
        whole = joined(images)
        types = token_types(chunks[0].bridge.whole.config, ids)
        of_all = whole, {**whole, "mm_token_type_ids": types}
        return tuple(mb.forward(chunks, ids, mask, images=form).log_probs for form in (images, *of_all))  # type: ignore[return-value]


@pytest.mark.parametrize("name", FAMILIES)
def test_one_mapping_of_a_processor_is_parted_by_rows(name: str) -> None:
    """Rows are separated by grids of patches, by sizes, by equal numbers of tokens, or by runs of tokens."""
    folder, batch, _ = seeing.case(name)
    with rank_of(ONE, 0, 1):
        (of_rows, whole, _), *_ = pool.run(1, two_forms, folder, batch, {})
    assert of_rows.any()
    assert torch.equal(of_rows, whole)


def test_one_mapping_of_a_processor_is_parted_by_rows_on_a_pipeline() -> None:
    folder, batch, _ = seeing.case("qwen3_vl")
    for of_rows, whole, typed in pool.run(2, two_forms, folder, batch, PP):
        assert torch.equal(of_rows, whole)
        assert torch.equal(of_rows, typed)


def test_a_mapping_for_all_rows_has_the_shape_of_the_batch() -> None:
    ids = torch.zeros(2, 3, dtype=torch.int64)
    for inputs, message in (
        ({"token_type_ids": torch.zeros(2, 4)}, r"of a batch must be \[2, 3\], found \(2, 4\)"),
        ({"position_ids": torch.zeros(3, 2, 4)}, r"of a batch must be \[n, 2, 3\], found \(3, 2, 4\)"),
        ({"position_ids": torch.zeros(2, 3)}, r"of a batch must be \[n, 2, 3\], found \(2, 3\)"),
    ):
        with pytest.raises(BatchError, match=message):
            _parted(inputs, ids, ids == 0, None)
    with pytest.raises(BatchError, match=r"numbers of shape \(1, 3\) as image_grid_thw: pass \[number of images, 3\]"):
        _parts({"pixel_values": torch.ones(4, 2), "image_grid_thw": torch.zeros(1, 3)}, [1, 0], ids == 0, 0)


def test_images_are_dealt_in_proportion_to_their_tokens() -> None:
    assert _dealt([16, 12, 4, 8], [7, 0, 1, 2]) == [2, 0, 1, 1]
    assert _dealt([16, 12, 4, 8], [7, 0, 2, 1]) is None
    assert _dealt([1, 1], [0, 6]) == [0, 2]
    assert _dealt([1], [0]) is None
