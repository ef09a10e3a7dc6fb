"""The rope of a text with images: each token has three or four positions, and each angle comes from one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mcore_bridge.batches.collectives import reduce_max
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
        num_positions: how many a token has, n.
        recompose: transformers' own function that takes each angle from one of these positions. It says how sections
            lie, and whether the dims of a pair are neighbours.
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
            position_ids: int64 ``[n, b, s]``. Of packed sequences, those of all context-parallel ranks, ``[n, 1, s]``;
                mcore then takes each rank's own. Otherwise those of this rank.
            mrope_section: as mcore passes it; not needed.
            cp_group: a context-parallel group to use instead of the constructor's.
        """
        frequencies = self._frequencies(position_ids, cp_group or self.cp_group).to(position_ids.device)
        angles: Tensor = self.recompose(position_ids[..., None].float() * frequencies)
        return angles.transpose(0, 1)[:, :, None]

    def _frequencies(self, position_ids: Tensor, cp_group: ProcessGroup | None) -> Tensor:
        """Those for the longest row. It counts padding for context parallelism, as megatron-core's ropes do."""
        if not self.rope.is_dynamic:
            return self.inv_freq
        longest = position_ids.max() + 1
        return self.rope.frequencies(int(longest if cp_group is None else reduce_max(longest, cp_group)))


def take_positions(chunk: GPTModel, num_positions: int, recompose: Callable[[Tensor], Tensor]) -> None:
    """Make a chunk compute its rope from the positions that it is given, ``num_positions`` for each token.

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


def text_positions(chunk: GPTModel, input_ids: Tensor, packed: Any) -> Tensor:
    """The positions of a text without images, as ``MultimodalRotary`` wants them: ``[n, b, s]`` or ``[n, 1, s]``.

    Args:
        input_ids: the tokens of this context-parallel rank.
        packed: ``packed_seq_params``, or None.
    """
    from mcore_bridge.factory.modules.torch_modules import own_text

    device, num_positions = input_ids.device, chunk.rotary_pos_emb.num_positions
    if packed is None:
        group = chunk.pg_collection.cp
        own = own_text(torch.arange(input_ids.size(1) * group.size(), device=device), group)
        return own.expand(num_positions, input_ids.size(0), -1)
    padded = packed.cu_seqlens_q_padded
    starts = (packed.cu_seqlens_q if padded is None else padded).to(device)
    counted = torch.arange(int(starts[-1]), device=device)
    return (counted - starts[:-1].long().repeat_interleave(starts.diff())).expand(num_positions, 1, -1)
