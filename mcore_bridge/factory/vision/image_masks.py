"""Masks with bidirectional attention within an image, as in Gemma. transformers makes one for each kind of layer.

The masks are passed in ``attention_bias``, which megatron-core gives to core attention, also in a recompute.
TransformerEngine has no kernel for such a mask, so torch's attention computes the microbatches that have one.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mcore_bridge.batches.images import BLOCKS
from mcore_bridge.factory.modules.backend import mixed
from mcore_bridge.factory.modules.torch_modules import CoreAttention

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

    from mcore_bridge.batches.rows import WholeRows


@dataclass(frozen=True, slots=True)
class Masks:
    """The visible keys of each query (True is visible), passed in the place of ``attention_bias``.

    Attributes:
        full: the masks of layers without a window: ``[1, 1, n, n]`` for each packed sequence of n tokens, in the order
            of the text; or one mask ``[b, 1, s, s]`` for rows. None: these layers are causal, and nothing is padding.
        sliding: the masks of layers with a window, or None.
    """

    full: Sequence[Tensor] | None
    sliding: Sequence[Tensor] | None


def sees_ahead(config: Any, arguments: Container[str]) -> bool:
    """Whether tokens of an image attend to later tokens of it.

    Args:
        config: the HF config of the composite. A Gemma 4 has a field for it.
        arguments: the names of the arguments of the composite's ``forward``. A Gemma 3 has one for its blocks.
    """
    return BLOCKS in arguments or getattr(config.text_config, "use_bidirectional_attention", None) == "vision"


def take_masks(chunk: GPTModel) -> None:
    """Make attention take ``Masks``."""
    for layer in chunk.decoder.layers:
        attention: Any = layer.self_attention
        core = attention.core_attention
        if not isinstance(core, CoreAttention):
            scale = {"softmax_scale": attention.config.softmax_scale, "pg_collection": attention.pg_collection}
            torchs = CoreAttention(attention.config, attention.layer_number, attention.attn_mask_type, "self", **scale)
            vars(core)["torchs"] = torchs  # it has no parameters, and is no submodule
        core.__class__ = mixed(Sighted, core.__class__)


class Sighted(nn.Module):
    """Core attention that takes ``Masks`` as ``attention_bias``."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        attention_bias: Any = None,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        core: CoreAttention = vars(self).get("torchs", self)
        visible = None
        if isinstance(attention_bias, Masks):
            visible = attention_bias.full if core.window_size is None else attention_bias.sliding
            attention_bias = None
        if visible is None:
            options = {"attention_bias": attention_bias, "packed_seq_params": packed_seq_params, **kwargs}
            return super().forward(query, key, value, *args, **options)
        return core.masked(query, key, value, visible, packed_seq_params)


def masks_of(rows: WholeRows, by_kind: Mapping[str, Tensor | None], packed: Any) -> Masks:
    """The masks of transformers, bool ``[b, 1, s, s]`` for whole rows or None, in the form for attention.

    Padding attends to itself, since a softmax over nothing has no value.
    """
    return Masks(*(_of_kind(rows, by_kind[name], packed) for name in ("full_attention", "sliding_attention")))


def _of_kind(rows: WholeRows, mask: Tensor | None, packed: Any) -> list[Tensor] | None:
    if mask is None:
        return None
    mask = mask | _itself(mask)
    if packed is None:
        return [mask]
    starts = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
    places = rows.in_text[0].split(starts.diff().tolist())
    return [_of_sequence(mask[row], own) for row, own in enumerate(places)]


def _of_sequence(mask: Tensor, places: Tensor) -> Tensor:
    """Cut from the mask of a row, ``[1, s, s]``, its tokens at ``places`` in the flattened rows; -1 is padding."""
    at = places.remainder(mask.size(-1))
    shown = mask[:, at][:, :, at] & (places >= 0)
    return (shown | _itself(shown))[None]


def _itself(mask: Tensor) -> Tensor:
    return torch.eye(mask.size(-1), dtype=torch.bool, device=mask.device)
