"""The images of a batch: one mapping for each row, as a processor of transformers makes it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mcore_bridge.batches.packing import PackedSequences
from mcore_bridge.batches.rows import is_empty, placed
from mcore_bridge.errors import BatchError

Images = Sequence[Mapping[str, Any] | None] | Mapping[str, Any]
"""For each row of a batch, the inputs of its images by transformers' names, or None for a row of text. Or one mapping
for the whole batch, as processors make it.
"""
Rows = Sequence[Mapping[str, Tensor]]
"""The inputs of each row as tensors; empty for a row of text."""
TYPES = "mm_token_type_ids"
"""The type of each token of a row: text (0), of an image (1) or of a video (2)."""
BLOCKS = "token_type_ids"
"""The name of ``TYPES`` in composites with bidirectional attention within an image."""
POSITIONS = "position_ids"
"""The positions of each token of a row, ``[3, seq]``, or ``[4, seq]`` for HunYuan, if a caller passes them."""
FRAMES = "num_frames_per_video"
"""The number of frames of each video, if pixels of videos have an entry for each frame."""
SHOWN = "shown"
"""True for tokens without padding: bool ``[rows, tokens]``, of the tokens of this context-parallel rank."""
OF_SEQUENCES = "of_sequences"
"""The images of each sequence of a microbatch, as ``OfSequences``."""
BY_TOKEN = (TYPES, POSITIONS)
_BY_TYPE = {TYPES, BLOCKS}
_OF_IMAGES = ("image_grid_thw", "image_sizes", "pixel_values")
_OF_VIDEOS = ("video_grid_thw", FRAMES, "pixel_values_videos")
"""Inputs with an entry for each image, or each video. The first that a row has counts."""
_PLACEHOLDERS = (("image_token_id", "image_token_index"), ("video_token_id", "video_token_index"))
"""Config fields of the ids that stand for features of images, and of videos."""


@dataclass(slots=True)
class OfSequences:
    """The images of each sequence of a microbatch, and their faults.

    Attributes:
        rows: for each sequence, the number of its row in the batch.
        images: for each sequence, the inputs of its images; empty for text.
        errors: faults that are found while other ranks wait, so that this rank must continue.
    """

    rows: Sequence[int]
    images: Rows
    errors: list[BatchError] = field(default_factory=list)

    @property
    def counts(self) -> list[tuple[int, int]]:
        """For each sequence, the numbers of its images and of its videos."""
        return [_counts(inputs) for inputs in self.images]


def placeholders(config: Any) -> list[int | None]:
    """The ids of tokens that stand for features of images, and of videos; None if a composite has none."""
    ids = ([getattr(config, name, None) for name in names] for names in _PLACEHOLDERS)
    return [next((token for token in tokens if token is not None), None) for tokens in ids]


def no_placeholder(config: Any) -> int:
    """A token id that stands for no feature."""
    return next(token for token in itertools.count() if token not in placeholders(config))


def token_types(config: Any, input_ids: Tensor) -> Tensor:
    """The type of each token, by its id: text (0), of an image (1) or of a video (2).

    GLM has one id for both. It means a video if it is between the start and the end of a video.
    """
    types = torch.zeros_like(input_ids)
    for kind, token in enumerate(placeholders(config), start=1):
        types = types if token is None else types.masked_fill(input_ids == token, kind)
    start, end = (getattr(config, f"video_{name}_token_id", None) for name in ("start", "end"))
    if start is None or end is None:
        return types
    is_video = (input_ids == start).cumsum(1) > (input_ids == end).cumsum(1)
    return types.masked_fill(is_video & (types == 1), 2)


def feature_types(config: Any, input_ids: Tensor, types: Tensor | None) -> Tensor:
    """Which tokens features replace: tokens of an image (1) or of a video (2), by their ids and by given types.

    Some processors also give a type to the breaks between the rows of an image, which no feature replaces.

    Args:
        types: the types from a caller. None: they follow from the ids.
    """
    by_id = token_types(config, input_ids)
    return by_id if types is None else types.masked_fill(by_id == 0, 0)


def require_images(images: Sequence[Mapping[str, Any] | None], num_rows: int, readable: frozenset[str] | None) -> None:
    """Raise ``BatchError`` unless each row has inputs that the model reads.

    Args:
        images: the images of a batch.
        num_rows: rows of the batch.
        readable: the names of inputs that the model reads. None: its tower is not built.
    """
    if isinstance(images, str | bytes) or not isinstance(images, Sequence | np.ndarray):
        raise BatchError(
            "images must be a list with a mapping or None for each row, or the one mapping that a processor makes of "
            f"all rows, found {type(images).__name__}: pass one of these"
        )
    if len(images) != num_rows:
        raise BatchError(
            f"images must have an entry for each of {num_rows} rows, found {len(images)}: "
            "add None for rows without images"
        )
    for row, inputs in enumerate(images):
        if inputs is not None and not isinstance(inputs, Mapping):
            raise BatchError(
                f"images must have a mapping of inputs or None for each row, found {type(inputs).__name__} in row "
                f"{row}: pass what the processor of the model makes of this row"
            )
    if readable is None and any(images):
        row = next(row for row, inputs in enumerate(images) if inputs)
        raise BatchError(
            f"a model that takes images must be built with vision='train' or 'frozen', found images in row {row} "
            "without a tower (vision='text_only'): leave them out, or build it so"
        )
    for row, inputs in enumerate(images):
        require_names(inputs or {}, readable or frozenset(), f"row {row}")


def require_names(inputs: Mapping[str, Any], readable: frozenset[str], where: str) -> None:
    """Raise ``BatchError`` if the model does not read some of the inputs."""
    if unknown := sorted(map(str, inputs.keys() - {*_BY_TYPE, *readable})):
        raise BatchError(
            f"images must have inputs that the model reads, found {unknown} in {where}: use its own processor, and "
            f"pass only {sorted(readable)} and {TYPES}"
        )


def tensors_of(inputs: Mapping[str, Any], row: int) -> dict[str, Any]:
    """The inputs of a row, with arrays and lists of numbers as tensors. Empty inputs are left out.

    Both names of token types become one.

    Raises:
        BatchError: an input is no array, such as a list of images of unequal sizes.
    """
    given = {TYPES if name == BLOCKS else name: value for name, value in inputs.items() if value is not None}
    tensors = {name: _tensor(value, name, row) for name, value in given.items()}
    return {name: value for name, value in tensors.items() if name in BY_TOKEN or not is_empty(value)}


def _tensor(value: Any, name: str, row: int) -> Tensor:
    try:
        tensor = value if isinstance(value, Tensor) else torch.from_numpy(np.asarray(value))
        if not tensor.dim():
            raise ValueError("it is a single number")
        return tensor
    except (TypeError, ValueError) as error:
        raise BatchError(
            f"{name} must be a tensor, found a {type(value).__name__} in row {row} that is no array: {error}. Call the "
            "processor with return_tensors='pt'"
        ) from error


def _require_joinable(images: Rows, rows: Iterable[int]) -> None:
    """Raise ``BatchError`` unless the inputs of the rows of a microbatch can be joined.

    transformers removes the padding of an image by its ``image_sizes``. For the frames of a video it cannot.
    """
    first: dict[str, tuple[int, Tensor]] = {}
    for row in rows:
        for name, value in images[row].items():
            known, one = first.setdefault(name, (row, value))
            grows = name == "pixel_values" and "image_sizes" in images[row] and one.dim() == value.dim()
            if name not in BY_TOKEN and one.shape[1:] != value.shape[1:] and not grows:
                raise BatchError(
                    f"{name} must have one shape behind its first dim in all rows of a microbatch, found "
                    f"{tuple(one.shape)} in row {known} and {tuple(value.shape)} in row {row}: pass micro_batch_size=1"
                )


def joined(images: Sequence[Mapping[str, Tensor] | None]) -> dict[str, Any]:
    """The inputs of some rows, joined along their first dim. Images of unequal sizes are padded with zeros."""
    names = dict.fromkeys(name for inputs in images if inputs for name in inputs if name not in BY_TOKEN)
    return {name: _joined([row[name] for row in images if row and row.get(name) is not None]) for name in names}


def _joined(values: Sequence[Tensor]) -> Tensor | None:
    sizes = [max(sizes) for sizes in zip(*(value.shape[1:] for value in values), strict=True)]
    return torch.cat([_padded(value, sizes) for value in values]) if values else None


def _padded(value: Tensor, sizes: Sequence[int]) -> Tensor:
    """Pad a tensor with zeros at the ends of all dims except the first, up to ``sizes``."""
    missing = [amount for size, has in zip(sizes, value.shape[1:], strict=True) for amount in (size - has, 0)]
    return torch.nn.functional.pad(value, missing[::-1]) if any(missing) else value


def token_types_of(images: Rows, shape: tuple[int, int], device: torch.device) -> Tensor | None:
    """The types of all tokens of a batch, int64 ``[batch, seq]``, if rows with images have them; else None.

    Raises:
        BatchError: only some of these rows have types, or types of another length.
    """
    given = {row: inputs.get(TYPES) for row, inputs in enumerate(images) if inputs}
    if all(types is None for types in given.values()):
        return None
    whole = torch.zeros(shape, dtype=torch.int64, device=device)
    for row, types in given.items():
        if not isinstance(types, Tensor) or types.numel() != shape[1]:
            given_here = tuple(types.shape) if isinstance(types, Tensor) else types
            raise BatchError(
                f"{TYPES} must have {shape[1]} numbers in each row with images, found {given_here} in row {row}"
            )
        whole[row] = types.reshape(-1).to(whole)
    return whole


def num_positions(chunk: Any) -> int:
    """How many positions a token of this model has with images. (For text, trainers may pass fewer.)"""
    return getattr(getattr(chunk, "rotary_pos_emb", None), "num_positions", 3)


def positions_of(images: Rows, shown: Tensor, count: int) -> Tensor | None:
    """The positions of all tokens of a batch, int64 ``[batch, seq, n]``, if rows with images have them; else None.

    The positions of a row of text are counted from 0.

    Args:
        images: the images of a batch.
        shown: int64 ``[batch, seq]``: 1 for tokens and 0 for padding.
        count: how many positions a token has, n.

    Raises:
        BatchError: only some of the rows with images have positions, or positions of another shape.
    """
    given = {row: inputs.get(POSITIONS) for row, inputs in enumerate(images) if inputs}
    if all(positions is None for positions in given.values()):
        return None
    whole, seq = (shown.cumsum(1) - 1).clamp(min=0)[..., None].repeat(1, 1, count), shown.size(1)
    for row, positions in given.items():
        if not isinstance(positions, Tensor) or positions.shape not in ((count, seq), (count, 1, seq)):
            given_here = tuple(positions.shape) if isinstance(positions, Tensor) else positions
            raise BatchError(
                f"{POSITIONS} must be [{count}, {seq}] in each row with images, found {given_here} in row {row}. "
                f"Pass {count} positions for each token, or leave them out of all rows"
            )
        whole[row] = positions.reshape(count, seq).T.to(whole)
    return whole


class SeenImages:
    """The images of a batch by microbatch, and their faults.

    Args:
        images: the checked images of each row.
        mask: bool ``[batch, seq]``: False at padding.
        rows: the rows of each microbatch.
        count: how many positions a token has.

    Raises:
        BatchError: inputs of images cannot be joined in a microbatch, or positions have another shape.
    """

    def __init__(self, images: Rows, mask: Tensor, rows: Sequence[slice], count: int) -> None:
        for of_batch in rows:
            _require_joinable(images, range(len(images))[of_batch])
        self._images, self._rows = images, rows
        shown = mask.long()
        self._types = token_types_of(images, (mask.size(0), mask.size(1)), mask.device)
        self._positions = positions_of(images, shown, count)
        self._has_tokens = shown.any(1).tolist()
        self.misfits: list[BatchError] = []

    def of(self, number: int, batch: PackedSequences, cp_rank: int) -> dict[str, Any]:
        """The inputs of images of a microbatch."""
        if number >= len(self._rows) or not any(self._images[self._rows[number]]):
            return {}
        rows = self._rows[number]
        packed = batch.packed_seq_params is not None
        kept = [row for row in range(len(self._images))[rows] if self._has_tokens[row] or not packed]
        inputs = joined([self._images[row] for row in kept])
        if self._types is not None:
            inputs[TYPES] = placed(self._types[rows], batch.places[cp_rank])
        if self._positions is not None:
            inputs[POSITIONS] = placed(self._positions[rows], batch.places[cp_rank]).permute(2, 0, 1)
        if not packed:  # a row of only padding counts as tokens: transformers needs at least one
            inputs[SHOWN] = (batch.places[cp_rank] >= 0) | (batch.position_ids == 0)
        return {**inputs, OF_SEQUENCES: OfSequences(kept, [self._images[row] for row in kept], self.misfits)}


def _counts(inputs: Mapping[str, Tensor]) -> tuple[int, int]:
    """The numbers of images and videos of a row."""
    images, videos = (
        next((len(value) for name in names if (value := inputs.get(name)) is not None), 0)
        for names in (_OF_IMAGES, _OF_VIDEOS)
    )
    return images, videos
