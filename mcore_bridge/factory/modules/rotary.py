"""The rotary embedding of a model: the inverse frequencies of transformers with the interface of mcore.

It does not remember earlier lengths: the same ``max_seq_len`` gives the same frequencies, on every rank and in any
order. mcore reads the attention factor from the config, and multiplies cosines and sines by it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor, nn

from mcore_bridge.config.rope import Rope
from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.modules.torch_modules import own_text

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from torch.distributed import ProcessGroup


class HFRotaryEmbedding(RotaryEmbedding):
    """``model.rotary_pos_emb`` with any rope of transformers, the dynamic type included.

    Args:
        rope: parameters and frequencies.
        rotary_interleaved: whether the dims of a pair are neighbours in a head, instead of one in each half.
        cp_group: the context-parallel group. Each of its ranks gets the angles of its own tokens.
    """

    def __init__(self, rope: Rope, *, rotary_interleaved: bool, cp_group: ProcessGroup | None) -> None:
        nn.Module.__init__(self)  # mcore's constructor would compute its own frequencies, on a CUDA device
        self.rope, self.rotary_interleaved, self.cp_group = rope, rotary_interleaved, cp_group
        self.seq_len_interpolation_factor = None  # the frequencies already include it
        self.inv_freq = rope.frequencies(None)
        self._angles: tuple[tuple[int, int, torch.device], Tensor] | None = None

    def get_freqs_non_repeated(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """The angles of positions ``offset`` to ``offset + max_seq_len``: fp32 ``[max_seq_len, rotated dims / 2]``."""
        device = torch.device(torch.cuda.current_device() if torch.cuda.is_available() else "cpu")
        key = (max_seq_len, offset, device)
        if self._angles is None or self._angles[0] != key:  # usually the same for all microbatches of a step
            frequencies = self.rope.frequencies(offset + max_seq_len) if self.rope.is_dynamic else self.inv_freq
            positions = torch.arange(offset, offset + max_seq_len, dtype=torch.float32, device=device)
            self._angles = key, torch.outer(positions, frequencies.to(device))
        return self._angles[1]

    def get_emb(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """The angles of every rotated dim of a head: fp32 ``[max_seq_len, 1, 1, rotated dims]``."""
        angles = self.get_freqs_non_repeated(max_seq_len, offset)
        both = torch.cat((angles, angles), dim=-1)
        if self.rotary_interleaved:
            both = angles.repeat_interleave(2, dim=-1)
        return both[:, None, None, :]

    def forward(
        self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: ProcessGroup | None = None
    ) -> Tensor:
        """The angles of this context-parallel rank's tokens, for mcore's ``apply_rotary_pos_emb``.

        Args:
            max_seq_len: tokens of the whole sequence, over all CP ranks.
            offset: the position of the first token.
            packed_seq: whether sequences are packed; mcore then cuts the angles itself.
            cp_group: a context-parallel group to use instead of the constructor's.
        """
        emb = self.get_emb(max_seq_len, offset)
        group = cp_group or self.cp_group
        if group is None or group.size() == 1 or packed_seq:
            return emb
        if max_seq_len % (2 * group.size()):
            raise ConfigError(
                f"the sequence length must be a multiple of {2 * group.size()} with cp={group.size()}, found "
                f"{max_seq_len}: pad sequences, as pack_sequences does"
            )
        return own_text(emb, group)


class LatentRotaryEmbedding(HFRotaryEmbedding):
    """The rope for mcore's multi-latent attention, which with ``rope_type`` "yarn" also wants the attention factor."""

    def __init__(self, rope: Rope, *, cp_group: ProcessGroup | None) -> None:
        super().__init__(rope, rotary_interleaved=False, cp_group=cp_group)
        self.attention_factor = rope.attention_factor

    def forward(self, *arguments: Any, **keywords: Any) -> tuple[Tensor, float]:  # type: ignore[override]
        """The angles, and the attention factor."""
        return super().forward(*arguments, **keywords), self.attention_factor

    def get_cached_cos_sin(
        self, seq_len: int, offset: int = 0, dtype: torch.dtype = torch.float32, packed_seq: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines times the attention factor, for mcore's fused kernel (``apply_rope_fusion``)."""
        angles, factor = self(seq_len, offset, packed_seq)
        return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def replace_rotary(chunk: GPTModel) -> None:
    """Replaces every rope that mcore built: that of the chunk, or by a shared one those of its latent attentions."""
    rope, cp_group = getattr(chunk.config, "hf_rope", None), chunk.pg_collection.cp
    if rope is None:
        return
    if hasattr(chunk, "rotary_pos_emb"):
        interleaved = chunk.config.rotary_interleaved
        chunk.rotary_pos_emb = HFRotaryEmbedding(rope, rotary_interleaved=interleaved, cp_group=cp_group)
    if chunk.config.multi_latent_attention:
        shared = LatentRotaryEmbedding(rope, cp_group=cp_group)
        for module in list(chunk.modules()):
            if isinstance(getattr(module, "rotary_pos_emb", None), RotaryEmbedding):  # indexers have one too
                module.rotary_pos_emb = shared
