"""The rotary embedding of a model: the inverse frequencies of transformers with the interface of megatron-core.

If frequencies depend on the length of a sequence, each sequence of a microbatch has its frequencies, and earlier
lengths have no effect. megatron-core reads the attention factor from the config, and multiplies cosines and sines by
it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor, nn

from mcore_bridge.batches.lengths import Lengths, lengths_of, packed_lengths
from mcore_bridge.batches.rows import inputs_by_name
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
        cp_group: the context-parallel group. Each of its ranks gets the angles for the tokens of that rank.

    Attributes:
        lengths: the lengths of the sequences of this call, from ``take_lengths``. None: all have the length of the
            angles.
        first: the position of the first token of each sequence. Only a later step of a draft head has another than 0.
    """

    def __init__(self, rope: Rope, *, rotary_interleaved: bool, cp_group: ProcessGroup | None) -> None:
        nn.Module.__init__(self)  # mcore's constructor would compute its own frequencies, on a CUDA device
        self.rope, self.rotary_interleaved, self.cp_group = rope, rotary_interleaved, cp_group
        self.seq_len_interpolation_factor = None  # the frequencies already include it
        self.inv_freq = rope.frequencies(None)
        self.lengths: Lengths | None = None
        self.first = 0
        self._angles: tuple[tuple[Lengths | None, int, int, torch.device], Tensor] | None = None
        self._known: dict[int, Tensor] = {}

    def get_freqs_non_repeated(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """The angles of positions ``offset`` to ``offset + max_seq_len``: fp32 ``[max_seq_len, rotated dims / 2]``."""
        frequencies = self.frequencies([offset + max_seq_len])[0].to(device := _device())
        return torch.outer(torch.arange(offset, offset + max_seq_len, dtype=torch.float32, device=device), frequencies)

    def get_emb(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """The angles of every rotated dim of a head, in fp32.

        Returns:
            ``[max_seq_len, 1, 1, rotated dims]``. With ``lengths``: ``[max_seq_len, b, 1, rotated dims]`` for rows, and
            ``[tokens, 1, 1, rotated dims]`` for packed sequences, one behind the other, with their padding.
        """
        key = (self.lengths, max_seq_len, offset, _device())
        if self._angles is None or self._angles[0] != key:  # usually the same for all layers, or all of a step
            self._angles = key, self._computed(max_seq_len, offset)
        angles = self._angles[1]
        both = torch.cat((angles, angles), dim=-1)
        if self.rotary_interleaved:
            both = angles.repeat_interleave(2, dim=-1)
        return both[:, :, None, :]

    def frequencies(self, lengths: Sequence[int]) -> Tensor:
        """The frequencies of sequences with these lengths: fp32, on CPU, ``[sequences, rotated dims / 2]``."""
        counting = [length if length > self.rope.longest_plain else 0 for length in lengths]
        for length in {*counting} - {*self._known}:
            self._known[length] = self.rope.frequencies(length) if length else self.inv_freq
        return torch.stack([self._known[length] for length in counting])

    def _computed(self, max_seq_len: int, offset: int) -> Tensor:
        """The angles of half of the rotated dims, as in ``get_emb`` without the dim of heads."""
        if self.lengths is None:
            return self.get_freqs_non_repeated(max_seq_len, offset)[:, None]
        device, places = _device(), self.lengths.places
        frequencies = self.frequencies(self.lengths.tokens).to(device)
        if places is None:
            positions = torch.arange(offset, offset + max_seq_len, dtype=torch.float32, device=device)
            return positions[:, None, None] * frequencies
        positions = torch.cat([torch.arange(size, dtype=torch.float32, device=device) for size in places]) + offset
        return (positions[:, None] * frequencies.repeat_interleave(torch.tensor(places, device=device), 0))[:, None]

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
        emb = self.get_emb(max_seq_len, offset + self.first)
        group = cp_group or self.cp_group
        if group is None or group.size() == 1 or packed_seq:
            return emb
        if max_seq_len % (2 * group.size()):
            raise ConfigError(
                f"the sequence length must be a multiple of {2 * group.size()} with cp={group.size()}, found "
                f"{max_seq_len}: pad sequences, as pack_sequences does"
            )
        return own_text(emb, group)


def _device() -> torch.device:
    """The device of angles."""
    return torch.device(torch.cuda.current_device() if torch.cuda.is_available() else "cpu")


class LatentRotaryEmbedding(HFRotaryEmbedding):
    """The rope for mcore's multi-latent attention, which with ``rope_type`` "yarn" also needs the attention factor."""

    def __init__(self, rope: Rope, *, cp_group: ProcessGroup | None) -> None:
        super().__init__(rope, rotary_interleaved=False, cp_group=cp_group)
        self.attention_factor = rope.attention_factor

    def get_rotary_seq_len(self, *arguments: Any, **keywords: Any) -> int:
        """The length of the angles, from mcore. A recomputed layer may belong to an earlier call of the chunk."""
        packed = arguments[4] if len(arguments) > 4 else keywords.get("packed_seq_params")
        if packed is not None and self.lengths is not None:
            self.lengths = packed_lengths(packed)
        length: int = super().get_rotary_seq_len(*arguments, **keywords)
        return length

    def forward(self, *arguments: Any, **keywords: Any) -> tuple[Tensor, float]:  # type: ignore[override]
        """The angles, and the attention factor."""
        return super().forward(*arguments, **keywords), self.attention_factor

    def get_cached_cos_sin(
        self, seq_len: int, offset: int = 0, dtype: torch.dtype = torch.float32, packed_seq: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines times the attention factor, for mcore's fused kernel (``apply_rope_fusion``)."""
        angles, factor = self(seq_len, offset, packed_seq)
        return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


class UnrotatedEmbedding(LatentRotaryEmbedding):
    """The rope of latent attention without a rope: all angles are zero, so mcore's rotation changes no score.

    There may be no rotated dims at all. mcore's ``rope_type`` is then "rope": its yarn needs some.
    """

    def __init__(self, num_dims: int, *, cp_group: ProcessGroup | None) -> None:
        plain = {"rope_type": "default", "rope_theta": 10000.0}
        super().__init__(Rope(parameters=plain, head_dim=num_dims or 2, max_position_embeddings=1), cp_group=cp_group)
        self.inv_freq, self.num_dims = torch.zeros(num_dims // 2), num_dims

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """The angles, with the attention factor if mcore expects it."""
        angles, factor = super().forward(*arguments, **keywords)
        return (angles, factor) if self.num_dims else angles


def replace_rotary(chunk: GPTModel) -> None:
    """Replace every rope that mcore built: the rope of the chunk, or, by a shared one, of its latent attentions."""
    rope, cp_group = getattr(chunk.config, "hf_rope", None), chunk.pg_collection.cp
    if rope is not None and hasattr(chunk, "rotary_pos_emb"):
        interleaved = chunk.config.rotary_interleaved
        chunk.rotary_pos_emb = HFRotaryEmbedding(rope, rotary_interleaved=interleaved, cp_group=cp_group)
    if chunk.config.multi_latent_attention:
        num_dims = chunk.config.qk_pos_emb_head_dim
        without = functools.partial(UnrotatedEmbedding, num_dims)
        shared = LatentRotaryEmbedding(rope, cp_group=cp_group) if rope else without(cp_group=cp_group)
        for module in list(chunk.modules()):
            if isinstance(getattr(module, "rotary_pos_emb", None), RotaryEmbedding):  # indexers have one too
                module.rotary_pos_emb = shared


def take_lengths(chunk: GPTModel) -> None:
    """Set the lengths of the sequences of each call on the ropes of a chunk, if frequencies depend on them.

    This hook runs last, when inputs are this rank's inputs. A KV cache gets the frequencies for the size of the cache.
    """
    ropes = [module for module in chunk.modules() if isinstance(module, HFRotaryEmbedding)]
    if any(rope.rope.is_dynamic for rope in ropes):
        chunk.register_forward_pre_hook(functools.partial(_take_lengths, ropes), with_kwargs=True)


def _take_lengths(
    ropes: Sequence[HFRotaryEmbedding], chunk: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    inputs = inputs_by_name(chunk, args, kwargs)
    is_cached = any(inputs.get(name) is not None for name in ("inference_context", "inference_params"))
    group = getattr(inputs.get("packed_seq_params"), "cp_group", None) or chunk.pg_collection.cp
    lengths = None if is_cached else lengths_of(inputs, group)
    for rope in ropes:
        rope.lengths = lengths
