"""The rows of a microbatch, as padded rows of trainers, as whole rows, and as the packed tokens of one rank.

Models of images need whole rows: an image may lie on two context-parallel ranks, and positions follow from all tokens
before. If the HF config of a model has a ``vision_config``, verl passes the padded rows of all context-parallel ranks.
A model of images packs and cuts these rows after its embedding. For a model of text alone, a hook packs and cuts them
before the ``forward`` of the chunk.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mcore_bridge.batches.lengths import packed_lengths, with_lengths
from mcore_bridge.batches.packing import PackedSequences, lay_out
from mcore_bridge.batches.text_collectives import gather
from mcore_bridge.errors import BatchError

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from torch.distributed import ProcessGroup


OF_OTHER_PARTS = (
    *("pixel_", "image_", "video_", "audio_", "second_per_grid", "input_features", "feature_", "batch_num_images"),
    "num_frames_per_video",
)
"""Prefixes of the names of inputs that transformers' processors make of images, video and sound."""


def take_padded_rows(chunk: GPTModel) -> None:
    """Let a chunk take padded rows too, by a hook, so that trainers can still inspect and replace its ``forward``.

    * ``input_ids`` and ``attention_mask`` ``[batch, seq]`` with ``packed_seq_params`` become this rank's ``[1,
      tokens]``, without a mask. The parameters have the number of tokens of each sequence with its padding.
    * Without them and without ``position_ids``, ``[batch, seq]`` becomes this rank's ``[batch, seq / cp]``, both.

    Any other call is not changed. The hook raises ``BatchError`` for inputs of images, video or sound, and for rows
    that do not fit their parameters.
    """
    chunk.register_forward_pre_hook(_as_text, with_kwargs=True)


def _as_text(chunk: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
    inputs, images = without_images(inputs_by_name(chunk, args, kwargs))
    if images:
        raise BatchError(
            f"a batch must be of text alone, found {', '.join(images)}: the models of images, video and sound are "
            "not built (vision='text_only'). Build with vision='train' or 'frozen', or leave out such rows"
        )
    return (), as_own_tokens(chunk, inputs)


def as_own_tokens(chunk: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs of a chunk by name, with padded rows replaced by the tokens of this rank."""
    ids, mask, params = (inputs.get(name) for name in ("input_ids", "attention_mask", "packed_seq_params"))
    if not isinstance(ids, Tensor) or mask is None or mask.shape != ids.shape:
        return inputs
    group = getattr(params, "cp_group", None) or chunk.pg_collection.cp
    cp, rank = group.size(), group.rank()
    if params is not None:
        own = lay_out_packed(ids, mask != 0, params, cp, rank)
        known = with_lengths(params, (mask != 0).sum(1).tolist())
        return {**inputs, "input_ids": own.input_ids, "attention_mask": None, "packed_seq_params": known}
    if cp > 1 and inputs.get("position_ids") is None:
        own = lay_out_rows(ids, cp, rank)
        return {**inputs, "input_ids": own.input_ids, "attention_mask": mask.flatten()[own.places[rank]]}
    return inputs


def inputs_by_name(chunk: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All inputs of a call of a chunk, by the names of the arguments."""
    return {**dict(zip(_argument_names(type(chunk).forward), args, strict=False)), **kwargs}


@functools.cache
def _argument_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the arguments of a model's ``forward``, in order. Cached, since every call needs them."""
    return tuple(inspect.signature(forward).parameters)[1:]


def without_images(inputs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The inputs of text; and the inputs of images, video or sound that are not None and not empty."""
    others = {name: value for name, value in inputs.items() if name.startswith(OF_OTHER_PARTS)}
    text = {name: value for name, value in inputs.items() if name not in others}
    return text, {name: value for name, value in others.items() if value is not None and not is_empty(value)}


def is_empty(value: Any) -> bool:
    """Whether an input has no image, such as the result of a processor for an empty list."""
    return isinstance(value, Tensor | list | tuple) and len(value) == 0


def lay_out_packed(ids: Tensor, mask: Tensor, params: Any, cp: int, rank: int) -> PackedSequences:
    """The tokens of one context-parallel rank in one row, in the order of ``packed_seq_params``."""
    mode = getattr(params, "cp_partition_mode", "zigzag")
    if cp > 1 and mode != "zigzag":
        raise BatchError(f"cp_partition_mode must be 'zigzag' at cp={cp}, found {mode!r}: use verl's default layout")
    starts = params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
    sizes, lengths = starts.diff().tolist(), mask.sum(1).tolist()
    whole = all(size % (2 * cp) == 0 for size in sizes) or cp == 1
    if len(sizes) != len(lengths) or any(map(int.__gt__, lengths, sizes)) or not whole:
        raise BatchError(
            f"packed_seq_params must have room for each of {len(lengths)} rows with {lengths} tokens, a multiple of "
            f"{2 * cp if cp > 1 else 1}, found {sizes}: make them from the same attention_mask"
        )
    return lay_out(ids, mask, lengths, sizes, 1, cp, rank)


def lay_out_rows(ids: Tensor, cp: int, rank: int) -> PackedSequences:
    """The tokens of one context-parallel rank, padding included."""
    rows, seq = ids.shape
    if cp > 1 and seq % (2 * cp):
        raise BatchError(
            f"padded rows must have a multiple of {2 * cp} tokens at cp={cp}, found {seq}: pad them to this multiple"
        )
    return lay_out(ids, torch.ones_like(ids, dtype=torch.bool), [seq] * rows, [seq] * rows, rows, cp, rank)


@dataclass(frozen=True, slots=True)
class WholeRows:
    """The sequences of a microbatch, with the tokens of all context-parallel ranks.

    Attributes:
        input_ids: int64 ``[batch, seq]``.
        mask: bool ``[batch, seq]``: False at padding.
        in_text: int64 ``[rows, tokens]``: indices into the flattened rows; -1 for padding. For packed sequences it
            covers all tokens in the order of the text, otherwise the tokens of this rank.
        layout: where the tokens of each context-parallel rank are.
        group: the context-parallel group.
        given_whole: whether the caller gave whole rows, and not this rank's tokens.
    """

    input_ids: Tensor
    mask: Tensor
    in_text: Tensor
    layout: PackedSequences
    group: ProcessGroup
    given_whole: bool

    def own(self, values: Tensor) -> Tensor:
        """From values ``[batch, seq, ...]``, select this rank's tokens: ``[rows, tokens, ...]``, zero at padding."""
        return placed(values, self.layout.places[self.group.rank()])

    def ordered(self, values: Tensor) -> Tensor:
        """Select from values ``[batch, seq, ...]`` the values at ``in_text``."""
        return placed(values, self.in_text)

    def whole(self, values: Tensor) -> Tensor:
        """Further inputs as values ``[batch, seq, ...]``: a caller passes them for whole rows, or for its tokens."""
        if self.given_whole or values.shape[:2] == self.mask.shape:
            return values
        return spread(gather(values, self.group), self.layout)


def whole_rows(inputs: dict[str, Any], group: ProcessGroup) -> WholeRows:
    """The whole rows of a call. Every context-parallel rank calls it together.

    Args:
        inputs: the inputs of the model by name. With ``packed_seq_params``, padded rows and their mask, or the tokens
            of this rank in one row. Without them, rows: whole at ``cp=1``, or if they have a mask and no positions.
        group: the context-parallel group.

    Raises:
        BatchError: rows do not fit their parameters.
    """
    ids, mask, params = (inputs.get(name) for name in ("input_ids", "attention_mask", "packed_seq_params"))
    assert isinstance(ids, Tensor)
    cp, rank = group.size(), group.rank()
    shown = mask != 0 if isinstance(mask, Tensor) and mask.shape == ids.shape else None
    if params is None:
        given_whole = cp == 1 or (shown is not None and inputs.get("position_ids") is None)
        rows = ids if given_whole else ids.new_zeros(ids.size(0), ids.size(1) * cp)
        layout = lay_out_rows(rows, cp, rank)
        in_text = layout.places[rank]
    else:
        given_whole = shown is not None
        rows, shown = (ids, shown) if shown is not None else _empty(params, ids.device)
        layout = lay_out_packed(rows, shown, params, cp, rank)
        in_text = layout.places[0] if cp == 1 else lay_out_packed(rows, shown, params, 1, 0).places[0]
    if not given_whole:
        rows = spread(gather(ids, group), layout)
        if params is None and shown is not None:
            shown = spread(gather(shown, group), layout)
    shown = torch.ones_like(rows, dtype=torch.bool) if shown is None else shown
    return WholeRows(rows, shown, in_text, layout, group, given_whole)


def _empty(params: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """Empty rows for packed sequences: ids of zero ``[batch, longest]``, and the mask of their tokens."""
    lengths = torch.tensor(packed_lengths(params).tokens, device=device).clamp(
        min=1
    )  # transformers needs at least one token
    mask = torch.arange(int(lengths.max()), device=device) < lengths[:, None]
    return torch.zeros_like(mask, dtype=torch.int64), mask


def placed(values: Tensor, places: Tensor) -> Tensor:
    """Values ``[batch, seq, ...]`` at ``places`` in the flattened rows; zero if the place is -1."""
    flat = values.flatten(0, 1)[places.clamp(min=0)]
    is_padding = (places < 0).view(*places.shape, *[1] * (flat.dim() - places.dim()))
    return flat.masked_fill(is_padding, 0)


def spread(values: Tensor, layout: PackedSequences) -> Tensor:
    """Values ``[cp, rows, tokens, ...]`` of all context-parallel ranks, as ``[batch, seq, ...]``."""
    has_place = layout.places >= 0
    rows = values.new_zeros(layout.shape[0] * layout.shape[1], *values.shape[3:])
    rows[layout.places[has_place]] = values[has_place]
    return rows.view(*layout.shape, *values.shape[3:])
