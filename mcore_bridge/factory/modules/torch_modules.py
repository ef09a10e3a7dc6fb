"""Plain torch modules as submodules of megatron-core's layer spec. They compute in the order of transformers.

They support features that megatron-core's torch modules refuse: sequence and context parallelism, zero-centred norms,
and sliding windows with both. They take the arguments of megatron-core's modules, so any spec may use them.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from einops import rearrange
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn

from mcore_bridge.errors import ConfigError

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig

_CAUSAL = frozenset(AttnMaskType[name] for name in ("causal", "padding_causal", "causal_bottom_right"))


class Norm(nn.Module):
    """RMSNorm or LayerNorm, by ``config.normalization``: statistics in fp32, cast back, then times the weight."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        if config.normalization not in ("RMSNorm", "LayerNorm"):
            raise ConfigError(f"normalization must be RMSNorm or LayerNorm, found {config.normalization!r}")
        self.eps, self.rms = eps, config.normalization == "RMSNorm"
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.weight = _parameter(config, hidden_size)
        biased = not self.rms and getattr(config, "norm_bias", True)
        self.bias = _parameter(config, hidden_size) if biased else None
        if config.perform_initialization:
            nn.init.constant_(self.weight, 0.0 if self.zero_centered else 1.0)
            if self.bias is not None:
                nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        weight: Tensor = self.weight
        if not self.rms:
            return nn.functional.layer_norm(
                hidden, weight.shape, weight + 1 if self.zero_centered else weight, self.bias, self.eps
            )
        return self.scaled(hidden, hidden.float().square().mean(-1, keepdim=True), weight)

    def scaled(self, hidden: Tensor, mean_square: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm of ``hidden``, given its mean square in fp32; ``weight`` broadcasts."""
        normed = hidden.float() * torch.rsqrt(mean_square + self.eps)
        if self.zero_centered:  # in fp32 to the end, as in gemma: bf16 would round 1 + weight
            return (normed * (1.0 + weight.float())).to(hidden.dtype)
        return weight * normed.to(hidden.dtype)


class UnitNorm(nn.Module):
    """RMSNorm or LayerNorm without weights, in fp32."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps, self.rms = eps, config.normalization == "RMSNorm"

    def forward(self, hidden: Tensor) -> Tensor:
        exact = hidden.float()
        if not self.rms:
            return nn.functional.layer_norm(exact, exact.shape[-1:], eps=self.eps).to(hidden.dtype)
        return (exact * (exact.square().mean(-1, keepdim=True) + self.eps).rsqrt()).to(hidden.dtype)


def placement(config: TransformerConfig) -> dict[str, Any]:
    """The dtype and device of new parameters, as arguments of ``torch.empty``."""
    device = None if config.use_cpu_initialization else torch.cuda.current_device()
    return {"dtype": config.params_dtype, "device": device}


def _parameter(config: TransformerConfig, size: int) -> nn.Parameter:
    parameter = nn.Parameter(torch.empty(size, **placement(config)))
    # With SP each TP rank has some tokens; finalize_model_grads sums the gradients of parameters with this attribute.
    parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return parameter


class CoreAttention(nn.Module):
    """Scaled dot-product attention of mcore's ``[s, b, heads, dim]`` tensors: grouped queries, windows, CP, dropout.

    With context parallelism, mcore gives rank r the chunks r and 2n-1-r of 2n. Every rank gathers all keys and values,
    puts them in the order of the text, and attends with its own queries.
    """

    softmax_types: ClassVar[tuple[str, ...]] = ("vanilla",)

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        k_channels: int | None = None,  # not needed: both dims are read from the tensors
        v_channels: int | None = None,
    ) -> None:
        super().__init__()
        if config.softmax_type not in self.softmax_types:
            raise ConfigError(f"softmax_type must be one of {self.softmax_types}, found {config.softmax_type!r}")
        self.attn_mask_type = attn_mask_type
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.softmax_scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        self.sequence_parallel = config.sequence_parallel
        self.cp_group = parallel_state.get_context_parallel_group() if pg_collection is None else pg_collection.cp
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window_size: tuple[int, int] | None = config.window_size if windowed else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Compute attention.

        Args:
            query: ``[s, b, heads, dim]``, the tokens of this CP rank; for packed sequences ``[s, heads, dim]``.
            key: ``[t, b, groups, dim]``; for packed sequences without ``b``.
            value: ``[t, b, groups, dim]``; for packed sequences without ``b``.
            attention_mask: True hides a position, in addition to ``attn_mask_type`` and the window. It broadcasts to
                ``[b, heads, s, t of all CP ranks in the order of the text]``. With two dims ``[b, s]`` it is a mask as
                in transformers, where 1 means a token.
            attn_mask_type: used instead of the layer's own, if it is given.
            attention_bias: must be None.
            packed_seq_params: the starts of packed sequences. Each sequence attends only to itself, and is distributed
                over the CP ranks by itself.

        Returns:
            ``[s, b, heads * dim]``; for packed sequences ``[s, heads * dim]``.
        """
        self._require(attention_mask, attention_bias, packed_seq_params)
        if packed_seq_params is None:
            return self._sequence(query, key, value, attention_mask, attn_mask_type)
        outputs, start = [], 0
        for length, run in groupby(packed_lengths(packed_seq_params, self.cp_group.size())):
            number = len([*run])  # sequences of one length are rows of a batch
            own = slice(start, start := start + number * length)
            q, k, v = (rearrange(tensor[own], "(b s) n d -> s b n d", b=number) for tensor in (query, key, value))
            outputs.append(rearrange(self._sequence(q, k, v, None, attn_mask_type), "s b h -> (b s) h"))
        return torch.cat(outputs)

    def _require(self, attention_mask: Tensor | None, attention_bias: Tensor | None, packed: Any) -> None:
        if attention_bias is not None:
            raise ConfigError("attention_bias must be None for CoreAttention: use backend te")
        if packed is not None and attention_mask is not None:
            raise ConfigError("attention_mask must be None for packed sequences: padding is not packed")

    def masked(self, query: Tensor, key: Tensor, value: Tensor, visible: Sequence[Tensor], packed: Any) -> Tensor:
        """Attend by masks alone (True is visible): ``[1, 1, n, n]`` for each packed sequence, or one for rows."""
        if packed is None:
            return self._sequence(query, key, value, None, None, visible[0])
        lengths = packed_lengths(packed, self.cp_group.size())
        parts = zip(*(tensor.unsqueeze(1).split(lengths) for tensor in (query, key, value)), visible, strict=True)
        return torch.cat([self._sequence(q, k, v, None, None, mask) for q, k, v, mask in parts]).squeeze(1)

    def _sequence(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None,
        visible: Tensor | None = None,
    ) -> Tensor:
        query_positions = places_in_text(query, key, self.cp_group)
        if self.cp_group.size() > 1:
            key, value = self._gather(key, value)
        causal = (attn_mask_type or self.attn_mask_type) in _CAUSAL
        if attention_mask is not None and attention_mask.dim() == 2:
            attention_mask = padding_hidden(attention_mask, query_positions, self.cp_group)
        hidden = self._hidden(query_positions, key.size(0), causal=causal, attention_mask=attention_mask)
        if visible is not None:
            hidden = ~visible[:, :, query_positions]
        query, key, value = (rearrange(tensor, "s b n d -> b n s d") for tensor in (query, key, value))
        with self._rng():
            context = self._attend(query, key, value, hidden, query_positions if causal else None)
        return rearrange(context, "b n s d -> s b (n d)")

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None, places: Tensor | None = None
    ) -> Tensor:
        """Attention of ``[b, n, s, d]`` tensors.

        Causal attention has ``places``, the positions of the queries ``[s]`` among the keys. If ``hidden`` is None, it
        hides a plain triangle.
        """
        return nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if hidden is None else ~hidden,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=hidden is None and places is not None,  # torch's causal kernel, without a mask in memory
            scale=self.softmax_scale,
            enable_gqa=query.size(1) != key.size(1),
        )

    def _gather(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        both = gather_text(torch.cat((key, value), dim=-1), self.cp_group)
        key, value = both.split((key.size(-1), value.size(-1)), dim=-1)
        return key, value

    def _hidden(
        self, query_positions: Tensor, num_keys: int, *, causal: bool, attention_mask: Tensor | None
    ) -> Tensor | None:
        """A mask in which True hides a position; None if SDPA's ``is_causal`` is enough, or nothing is hidden."""
        square = self.cp_group.size() == 1 and query_positions.numel() == num_keys
        if attention_mask is None and self.window_size is None and (square or not causal):
            return None
        ahead = torch.arange(num_keys, device=query_positions.device) - query_positions[:, None]
        left, right = self.window_size or (-1, -1)
        hidden = ahead > 0 if causal else torch.zeros_like(ahead, dtype=torch.bool)
        hidden = hidden | (ahead < -left) if left >= 0 else hidden
        hidden = hidden | (ahead > right) if right >= 0 else hidden
        return hidden if attention_mask is None else hidden | attention_mask

    def _rng(self) -> contextlib.AbstractContextManager[None]:
        """A random state in which TP ranks drop different places. With SP, the whole block already runs in it."""
        if self.dropout == 0.0 or not self.training or self.sequence_parallel:
            return contextlib.nullcontext()
        return get_cuda_rng_tracker().fork()


def padding_hidden(counting: Tensor, query_positions: Tensor, cp_group: Any) -> Tensor:
    """``[b, 1, s, t]``, True where padding is hidden. Padding attends to itself, so that no row is empty."""
    shown = gather_text(counting.bool().t(), cp_group).t()
    places = torch.arange(shown.size(1), device=shown.device)
    return ~shown[:, None, None, :] & (places != query_positions[:, None])


def first_tokens(counting: Tensor, cp_group: Any) -> Tensor:
    """``[b]``, the position of the first token in each row, from the same mask: rows may be padded on the left."""
    return gather_text(counting.bool().t(), cp_group).long().argmax(0)


def sharded_tensors(attention: nn.Module, prefix: str, sharded_offsets: tuple[Any, ...]) -> dict[str, Any]:
    """The ``sharded_state_dict`` of core attention with parameters. TP cuts the sinks, one per head."""
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

    own, cut = attention.state_dict(keep_vars=True), {"softmax_offset": 0}
    tensors: dict[str, Any] = make_sharded_tensors_for_checkpoint(own, prefix, cut, sharded_offsets)
    return tensors


def packed_lengths(packed: Any, num_ranks: int) -> list[int]:
    """The number of tokens of each packed sequence on a context-parallel rank, padding included."""
    padded = getattr(packed, "cu_seqlens_q_padded", None)
    starts = packed.cu_seqlens_q if padded is None else padded
    return [length // num_ranks for length in starts.diff().tolist()]


def zigzag(rank: int, num_ranks: int) -> tuple[int, int]:
    """The two of ``2 * num_ranks`` chunks that mcore gives to a context-parallel rank: one early, one late."""
    return rank, 2 * num_ranks - 1 - rank


def gather_text(own: Tensor, cp_group: Any) -> Tensor:
    """The tokens (dim 0) of all context-parallel ranks, in the order of the text. The backward sums gradients."""
    num_ranks = cp_group.size()
    if num_ranks == 1:
        return own
    dealt = [index for rank in range(num_ranks) for index in zigzag(rank, num_ranks)]
    chunks = gather_from_sequence_parallel_region(own, group=cp_group).chunk(2 * num_ranks)
    return torch.cat([chunks[dealt.index(place)] for place in range(2 * num_ranks)])


def own_text(whole: Tensor, cp_group: Any) -> Tensor:
    """The tokens (dim 0) of this context-parallel rank: the inverse of ``gather_text``."""
    if cp_group.size() == 1:
        return whole
    chunks = whole.chunk(2 * cp_group.size())
    return torch.cat([chunks[index] for index in zigzag(cp_group.rank(), cp_group.size())])


def places_in_text(query: Tensor, key: Tensor, cp_group: Any) -> Tensor:
    """The positions of the queries in the text. Without CP they are the last ones (a KV cache has more keys)."""
    num_ranks, device = cp_group.size(), query.device
    if num_ranks == 1:
        return torch.arange(key.size(0) - query.size(0), key.size(0), device=device)
    chunk = query.size(0) // 2
    places = torch.arange(chunk, device=device)
    return torch.cat([places + chunk * index for index in zigzag(cp_group.rank(), num_ranks)])


def places_in_sequences(packed: Any, cp_group: Any, device: torch.device) -> Tensor:
    """The positions of this CP rank's tokens, each in its own packed sequence."""
    num_ranks = cp_group.size()
    lengths = packed_lengths(packed, num_ranks)
    return torch.cat([own_text(torch.arange(length * num_ranks, device=device), cp_group) for length in lengths])


@functools.cache
def always_biased(linear: type) -> type:
    """A subclass of ``linear``, an output projection, that always has a bias."""
    return type(f"Biased{linear.__name__}", (AlwaysBiased, linear), {"__doc__": AlwaysBiased.__doc__})


class AlwaysBiased(nn.Module):
    """An output projection that always has a bias, for models whose other linear layers may have none."""

    # mcore 0.19 passes `name` in addition.
    def __init__(self, input_size: int, output_size: int, *, bias: bool, **arguments: Any) -> None:
        super().__init__(input_size, output_size, bias=True, **arguments)
