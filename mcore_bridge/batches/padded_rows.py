"""Let the text model of a composite take the batches that trainers make for models of images.

If the HF config of a model has a ``vision_config``, verl passes it the padded rows of all context-parallel ranks. A
model of images packs and cuts them after its embedding. A text model packs and cuts them before.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mcore_bridge.batches.lengths import with_lengths
from mcore_bridge.batches.packing import PackedSequences, lay_out
from mcore_bridge.errors import BatchError

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

OF_OTHER_PARTS = (
    *("pixel_", "image_", "video_", "audio_", "second_per_grid", "input_features", "feature_", "batch_num_images"),
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
            "carried and not built (vision='carried'). Build with vision='train' or 'frozen', or leave out such rows"
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
