"""The rope of a text with images: each token has three or four positions, and each angle comes from one of them.

The fourth position of HunYuan is the number of an image in its sequence. transformers continues this count from row to
row, so a row would depend on the rows before it in its microbatch. Here positions are computed for each row separately.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mcore_bridge.batches.lengths import lengths_of, packed_lengths
from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.modules.rotary import HFRotaryEmbedding

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from torch.distributed import ProcessGroup

    from mcore_bridge.config.rope import Rope


class MultimodalRotary(HFRotaryEmbedding):
    """``model.rotary_pos_emb`` of given positions, with any rope of transformers.

    Args:
        rope: parameters and frequencies.
        num_positions: how many positions a token has, n.
        recompose: transformers' function that selects the position of each angle. It determines the order of sections,
            and whether the dims of a pair are neighbours.
        cp_group: the context-parallel group.
    """

    def __init__(
        self,
        rope: Rope,
        *,
        num_positions: int,
        recompose: Callable[[Tensor], Tensor],
        cp_group: ProcessGroup | None,
    ) -> None:
        super().__init__(rope, rotary_interleaved=False, cp_group=cp_group)
        self.num_positions, self.recompose = num_positions, recompose

    def forward(  # type: ignore[override]
        self, position_ids: Tensor, mrope_section: Any = None, cp_group: ProcessGroup | None = None
    ) -> Tensor:
        """The angles of exactly these positions, for mcore's ``apply_rotary_pos_emb``: fp32 ``[s, b, 1, dims]``.

        Args:
            position_ids: int64 ``[n, b, s]``. For packed sequences, the positions of all context-parallel ranks, ``[n,
                1, s]``, from which mcore selects each rank's. Otherwise the positions of this rank.
            mrope_section: as mcore passes it; not needed.
            cp_group: a context-parallel group to use instead of the constructor's.
        """
        frequencies = self._of_tokens(position_ids.device)
        angles: Tensor = self.recompose(position_ids[..., None].float() * frequencies)
        return angles.transpose(0, 1)[:, :, None]

    def _of_tokens(self, device: torch.device) -> Tensor:
        """The frequencies of each token: ``[b, 1, dims / 2]`` for rows, ``[tokens, dims / 2]`` for packed sequences."""
        if self.lengths is None:
            return self.inv_freq.to(device)
        frequencies, places = self.frequencies(self.lengths.tokens).to(device), self.lengths.places
        if places is None:
            return frequencies[:, None]
        return frequencies.repeat_interleave(torch.tensor(places, device=device), 0)


def take_positions(chunk: GPTModel, num_positions: int, recompose: Callable[[Tensor], Tensor]) -> None:
    """Make a chunk compute its rope from given positions, ``num_positions`` for each token.

    Raises:
        ConfigError: a fused kernel would count positions by itself.
    """
    if chunk.config.apply_rope_fusion:
        raise ConfigError(
            "apply_rope_fusion must be False for a model of images, found True: the kernel counts positions by itself. "
            "Remove the override"
        )
    chunk.rotary_pos_emb = MultimodalRotary(
        chunk.config.hf_rope, num_positions=num_positions, recompose=recompose, cp_group=chunk.pg_collection.cp
    )
    chunk.position_embedding_type, chunk.mrope_section = "mrope", None


def text_positions(chunk: GPTModel, inputs: dict[str, Any]) -> Tensor:
    """The positions of a text without images, in the form for ``MultimodalRotary``: ``[n, b, s]`` or ``[n, 1, s]``.

    If the rope depends on the length, padding has the position of the last token.

    Args:
        inputs: the inputs of the chunk by name, for the tokens of this context-parallel rank.
    """
    from mcore_bridge.factory.modules.torch_modules import own_text

    ids, packed, rotary = inputs["input_ids"], inputs.get("packed_seq_params"), chunk.rotary_pos_emb
    group = getattr(packed, "cp_group", None) or chunk.pg_collection.cp
    if packed is None:
        own = own_text(torch.arange(ids.size(1) * group.size(), device=ids.device), group).expand(ids.size(0), -1)
    else:
        places = packed_lengths(packed).places or ()
        own = torch.cat([torch.arange(size, device=ids.device) for size in places])[None]
    if rotary.rope.is_dynamic and (lengths := lengths_of(inputs, group)) is not None:
        last = torch.tensor(lengths.tokens, device=ids.device)[:, None] - 1
        if lengths.places is not None:
            last = last.flatten().repeat_interleave(torch.tensor(lengths.places, device=ids.device))[None]
        own = own.minimum(last.clamp(min=0))
    return own.expand(rotary.num_positions, *own.shape)


WITH_NUMBER = 4
"""How many positions a token has if the last one is the number of its image."""


def take_positions_per_row(composite: nn.Module) -> None:
    """Make transformers' ``get_rope_index`` of this composite compute the positions of one row at a time."""
    composite.get_rope_index = partial(_by_row, composite.get_rope_index)  # type: ignore[assignment]


def _by_row(
    positions_of: Any,
    input_ids: Tensor,
    mm_token_type_ids: Tensor,
    image_grid_thw: Tensor | None = None,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Like transformers' function: positions ``[n, b, s]``, and the offset of later positions ``[b, 1]``."""
    shown = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    is_image = (mm_token_type_ids == 1) & (shown != 0)
    begins = is_image & ~torch.nn.functional.pad(is_image, (1, 0))[:, :-1]
    ends = begins.sum(1).cumsum(0).tolist()
    ends[-1] = None  # transformers raises if some are left
    parts = []
    for row, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        one = slice(row, row + 1)
        grids = None if image_grid_thw is None else image_grid_thw[start:end]
        parts.append(positions_of(input_ids[one], mm_token_type_ids[one], grids, shown[one], **options))
    positions, lags = zip(*parts, strict=True)
    return torch.cat(positions, 1), torch.cat(lags)
