"""The images of each row: the images of a batch are split by rows, and each row is checked by itself.

transformers compares only the sums over all rows of a microbatch, and ignores rows without pixels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mcore_bridge.batches.images import (
    BLOCKS,
    FRAMES,
    POSITIONS,
    TYPES,
    Images,
    Rows,
    feature_types,
    require_images,
    require_names,
    tensors_of,
    token_types_of,
)
from mcore_bridge.errors import BatchError

_KINDS = ("images", "videos")
_GRIDS = ("image_grid_thw", "video_grid_thw")
_PIXELS = ("pixel_values", "pixel_values_videos")


def images_of_rows(
    images: Images | None, input_ids: Tensor, mask: Tensor, config: Any, readable: frozenset[str] | None
) -> tuple[Rows, Tensor]:
    """The inputs of the images of each row, checked against the image tokens; and the positions of these tokens.

    Args:
        images: the images of a batch, as for ``forward``.
        input_ids: int64 ``[batch, seq]``.
        mask: bool ``[batch, seq]``: False at padding.
        config: the HF config of the composite; None for a model of text.
        readable: the names of inputs that the model reads. None: its tower is not built, and all rows are of text.

    Returns:
        The inputs of each row, and bool ``[batch, seq]``: True at tokens that a feature of an image or a video
        replaces.

    Raises:
        BatchError: a row has inputs of another form, or inputs that do not fit its tokens.
    """
    if isinstance(images, Mapping) and readable is not None:
        require_names(images, readable, "the mapping for the whole batch")
        images = _parted(images, input_ids, mask, config)
    elif isinstance(images, Mapping):
        images = [images] * len(input_ids)
    given = [None] * len(input_ids) if images is None else images
    require_images(given, len(input_ids), readable)
    rows = [tensors_of(inputs or {}, row) for row, inputs in enumerate(given)]
    if readable is None:
        return rows, torch.zeros_like(mask)
    types = feature_types(config, input_ids, token_types_of(rows, (mask.size(0), mask.size(1)), mask.device))
    tokens, in_tiles = _tokens_by_row(types, mask), getattr(config, "image_grid_pinpoints", None) is not None
    if problems := [*_misfits(rows, tokens, readable, in_tiles=in_tiles)]:
        raise BatchError("images must fit their rows, found " + "; ".join(problems))
    return rows, types > 0


def _tokens_by_row(types: Tensor, mask: Tensor) -> list[list[int]]:
    """How many tokens of each row stand for features of images, and how many for features of videos."""
    counts: list[list[int]] = torch.stack([((types == kind) & mask).sum(1) for kind in (1, 2)], 1).tolist()
    return counts


def _misfits(rows: Rows, tokens: Sequence[Sequence[int]], readable: frozenset[str], *, in_tiles: bool) -> Iterator[str]:
    for row, (inputs, counts) in enumerate(zip(rows, tokens, strict=True)):
        for kind, count in enumerate(counts):
            if problem := _misfit(inputs, kind, count, readable, in_tiles=in_tiles):
                yield f"in row {row}: {problem}"


def _misfit(inputs: Mapping[str, Tensor], kind: int, count: int, readable: frozenset[str], *, in_tiles: bool) -> str:
    """The fault of the images or the videos of a row, or "".

    Pixels of tiles ``[tiles, channels, height, width]`` may have several entries for an image.
    """
    what, grid_name = _KINDS[kind], _GRIDS[kind]
    pixels = next((inputs[name] for name in inputs if _is_pixels(name) and kind_of(name) == kind), None)
    if pixels is None:
        absent = f"no {_PIXELS[kind]}: give the row its {what}"
        if count:
            return (
                f"{count} tokens that stand for {what}, and {absent}. If the model has sampled them, pass {TYPES} in "
                "each row with images, or in this one, which has 0 there"
            )
        return f"{grid_name}, and {absent}" if grid_name in inputs else ""
    if not count:
        return (
            f"{what}, and no tokens that stand for them: do not cut rows inside an image, and give each row its own "
            f"{what}"
        )
    if grid_name not in readable:
        sizes = None if kind or (in_tiles and pixels.dim() == 4) else inputs.get("image_sizes")
        if sizes is None or len(sizes) == len(pixels):
            return ""
        return f"{len(pixels)} images, where image_sizes has {len(sizes)}: give each row its own images"
    grid = inputs.get(grid_name)
    if problem := _wrong_grid(grid, kind):
        return problem
    assert grid is not None
    if (patches := int(grid.prod(1).sum())) != len(pixels):
        return f"{len(pixels)} patches, where {grid_name} has {patches}: give each row its own {what}"
    return ""


def _wrong_grid(grid: Tensor | None, kind: int) -> str:
    if grid is not None and grid.dim() == 2 and grid.size(1) == 3 and bool((grid > 0).all()):
        return ""
    held = "none" if grid is None else f"numbers of shape {tuple(grid.shape)}"
    return (
        f"{_KINDS[kind]}, and {held} as {_GRIDS[kind]}: pass [number of {_KINDS[kind]}, 3] of at least 1, as the "
        "processor returns it"
    )


def _is_pixels(name: str) -> bool:
    return name.startswith("pixel_values")


def kind_of(name: str) -> int:
    """Whether an input is of images (0) or of videos (1)."""
    return int("video" in name or name.startswith("second_per_grid"))


# one mapping for all rows ---------------------------------------------------------------------------------------------


def _parted(inputs: Mapping[str, Any], input_ids: Tensor, mask: Tensor, config: Any) -> list[dict[str, Tensor] | None]:
    """The inputs of each row, split from the inputs that a processor has made of all rows."""
    whole, (batch, seq) = tensors_of(inputs, 0), input_ids.shape
    rows: list[dict[str, Tensor]] = [{} for _ in range(batch)]
    types, positions = whole.pop(TYPES, None), whole.pop(POSITIONS, None)
    if types is not None and types.shape != (batch, seq):
        raise BatchError(f"{TYPES} or {BLOCKS} of a batch must be {[batch, seq]}, found {tuple(types.shape)}")
    if positions is not None and (positions.dim() != 3 or positions.shape[1:] != (batch, seq)):
        raise BatchError(f"{POSITIONS} of a batch must be [n, {batch}, {seq}], found {tuple(positions.shape)}")
    standing = feature_types(config, input_ids, None if types is None else types.to(input_ids))
    tokens = _tokens_by_row(standing, mask)
    for kind in (0, 1):
        own = {name: value for name, value in whole.items() if kind_of(name) == kind}
        stands = (standing == kind + 1) & mask
        for row, parts in enumerate(_parts(own, [of_row[kind] for of_row in tokens], stands, kind) if own else ()):
            rows[row].update(parts)
    for row, of_row in enumerate(rows):
        of_row.update({} if types is None else {TYPES: types[row]})
        of_row.update({} if positions is None else {POSITIONS: positions[:, row]})
    return [of_row or None for of_row in rows]


def _parts(inputs: dict[str, Tensor], tokens: list[int], stands: Tensor, kind: int) -> list[dict[str, Tensor]]:
    """The inputs of one kind by row: each row gets the number of images for which it has tokens."""
    grid = inputs.get(_GRIDS[kind])
    if grid is not None and (problem := _wrong_grid(grid, kind)):
        raise BatchError(f"images must fit their rows, found {problem}")
    pixels = next((value for name, value in inputs.items() if _is_pixels(name)), None)
    frames = inputs.get(FRAMES)
    first = next((value for value in (grid, frames, pixels) if value is not None), None)
    count = 0 if first is None else len(first)
    sizes = inputs.get("image_sizes") if kind == 0 else None
    patches = grid.prod(1).long().tolist() if grid is not None else [1] * count if frames is None else frames.tolist()
    areas = sizes.prod(1).long().tolist() if sizes is not None and sizes.dim() == 2 and len(sizes) == count else patches
    starts = (stands & ~torch.nn.functional.pad(stands, (1, 0))[:, :-1]).sum(1).tolist()
    counts = _dealt(areas, tokens) or _dealt([1] * count, tokens) or (starts if sum(starts) == count else None)
    if counts is None:
        raise BatchError(
            f"the {_KINDS[kind]} of a batch must fit its tokens, found {count} for rows in which {tokens} tokens stand "
            "for them. Do not cut rows inside an image, or pass a list with the inputs of each row"
        )
    ends = torch.tensor([0, *counts]).cumsum(0).tolist()
    of_row = [slice(start, end) for start, end in pairwise(ends)]
    parts: list[dict[str, Tensor]] = [{} for _ in tokens]
    for name, value in inputs.items():
        in_patches = grid is not None and _is_pixels(name) if frames is None else name != FRAMES
        entries = "patches or frames" if in_patches else _KINDS[kind]
        if len(value) != (sum(patches) if in_patches else count):
            raise BatchError(
                f"{name} of a batch must have an entry for each of {sum(patches) if in_patches else count} "
                f"{entries}, found {tuple(value.shape)}. Pass all that the processor of the model returns, or a list "
                "with the inputs of each row"
            )
        pieces = value.split([sum(patches[at]) for at in of_row] if in_patches else counts)
        for own, piece, number in zip(parts, pieces, counts, strict=True):
            own.update({name: piece} if number else {})
    return parts


def _dealt(weights: Sequence[int], tokens: Sequence[int]) -> list[int] | None:
    """How many images each row has, if each image has tokens in proportion to its weight; None if this does not fit."""
    whole, left, counts = (sum(weights), sum(tokens)), list(weights), []
    for of_row in tokens:
        taken, count = 0, 0
        while left and taken * whole[1] < of_row * whole[0]:
            taken, count = taken + left.pop(0), count + 1
        if taken * whole[1] != of_row * whole[0]:
            return None
        counts.append(count)
    return None if left else counts
