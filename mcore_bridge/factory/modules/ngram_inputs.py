"""Embeddings of n-grams, which some layers add to their residual streams before they read them.

The last tokens up to each token are hashed, and each head looks up a row of its own for them. Its rows are cut over TP.
They give a key for each stream and one value. How well a key fits its stream decides how much of the value is added. A
convolution of these sums is added, too. Only the first stage knows tokens, so these layers are in it.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import VocabParallelEmbedding
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (the usual name)

from mcore_bridge.factory.modules.backend import LayerContext, free_after_forward, read_tokens, require_tokens
from mcore_bridge.factory.modules.convolved import CausalConv, Text, by_channels
from mcore_bridge.factory.modules.latent import ReplicatedLinear
from mcore_bridge.factory.modules.streams import StreamNorm, apart
from mcore_bridge.factory.modules.torch_modules import gather_text, own_text, packed_lengths

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

_MASK = (1 << 64) - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""The constants of SplitMix64."""
_PER_LAYER = 10007


def adapt_ngrams(layer: Any, context: LayerContext) -> None:
    """Lets a layer add embeddings of n-grams to its streams, if its config has an ``ngram_layer``."""
    number = getattr(context.config, "ngram_layer", None)
    if number is not None:
        layer.input_layernorm = _behind_ngrams(layer.input_layernorm, number)


def _behind_ngrams(norm: type, number: int) -> type:
    """``norm``, which reads streams, with the embeddings of n-grams that are added to them before."""

    class Behind:
        """The constructor returns the norm, like megatron-core's ``TENorm``."""

        def __new__(cls, config: Any, *sizes: int, **arguments: Any) -> Any:
            module: Any = norm(config, *sizes, **arguments)
            module.ngrams = NGramInput(config, number)
            return module

    return Behind


def give_ngrams(chunk: GPTModel) -> None:
    """Let the embedding of a chunk give its tokens to its layers with embeddings of n-grams."""
    inputs = [module for module in chunk.decoder.modules() if isinstance(module, NGramInput)]
    if not inputs:
        return
    text = Tokens()
    for module in inputs:
        module.text = text

    def give(tokens: Tensor, embedded: Tensor) -> None:
        text.tokens = tokens

    def note(decoder: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        text.note(named["attention_mask"], named.get("packed_seq_params"))

    read_tokens(chunk, give)
    chunk.decoder.register_forward_pre_hook(note, with_kwargs=True)
    free_after_forward(chunk.decoder, [text], tokens=None, packed=None, counting=None)


class Tokens(Text):
    """The tokens of a forward, ``[b, s]`` of this CP rank, beside what attention knows of them."""

    tokens: Tensor | None = None


class NGramInput(MegatronModule):
    """What a layer adds to its streams. Its number among such layers decides its hashes."""

    def __init__(self, config: Any, number: int) -> None:
        super().__init__(config)
        self.ngrams, self.text, self.count = config.ngrams, Tokens(), config.mhc_num_residual_streams
        self.hidden, all_streams = config.hidden_size, self.count * config.hidden_size
        own = config.ngrams
        heads = own.rows_of_heads(number)
        self.word_embeddings = VocabParallelEmbedding(
            own.rows(number),
            own.width // len(heads),
            init_method=config.init_method,
            reduce_scatter_embeddings=config.sequence_parallel,
            config=config,
        )
        device = self.word_embeddings.weight.device
        factors = multipliers(config.hf_vocab_size, own.size, own.seed + _PER_LAYER * number)
        starts = [0, *accumulate(heads)][:-1]
        for name, numbers in (("multipliers", factors), ("rows_of_heads", heads), ("starts_of_heads", starts)):
            self.register_buffer(name, torch.tensor(numbers, dtype=torch.int64, device=device))
        self.linear_key = ReplicatedLinear(own.width, all_streams, config)
        self.linear_value = ReplicatedLinear(own.width, self.hidden, config)
        self.key_norm, self.query_norm, self.conv_norm = (StreamNorm(config) for _ in range(3))
        self.conv = NGramConv(config, all_streams, own.kernel, own.size)

    def forward(self, streams: Tensor) -> Tensor:
        """``[s, b, n * hidden]``; with sequence parallelism s are the tokens of this TP rank."""
        embedded = self._embedded()
        keys = apart(self.key_norm(self.linear_key(embedded)[0]), self.count)
        fits = (keys * apart(self.query_norm(streams), self.count)).sum(-1, keepdim=True) / math.sqrt(self.hidden)
        gates = (fits.abs().clamp_min(1e-6).sqrt() * fits.sign()).sigmoid()
        gated = (gates * self.linear_value(embedded)[0].unsqueeze(-2)).flatten(-2)
        return gated + by_channels(
            self.conv_norm(gated),
            lambda channels, first: self.conv(channels, first, self.text),
            sequence_parallel=self.config.sequence_parallel,
        )

    def _embedded(self) -> Tensor:
        """The rows of all heads of each token, ``[s, b, width]``."""
        tokens, text = require_tokens(self.text.tokens, "some layers have embeddings of n-grams"), self.text
        if text.counting is not None:
            tokens = tokens.where(text.counting.bool(), self._end)
        cp_group = parallel_state.get_context_parallel_group()
        lengths = packed_lengths(text.packed, cp_group.size()) if text.packed else [tokens.size(1)]
        rows = [self._rows(gather_text(part, cp_group)) for part in tokens.t().long().split(lengths)]
        own = torch.cat([own_text(part, cp_group) for part in rows])
        embedded: Tensor = self.word_embeddings(own.transpose(0, 1))
        return (embedded if self.config.sequence_parallel else embedded.transpose(0, 1)).flatten(-2)

    @property
    def _end(self) -> int:
        end = self.ngrams.end
        return int(end[0] if isinstance(end, tuple) else end)

    def _rows(self, tokens: Tensor) -> Tensor:
        """The row of each head, ``[s, b, heads]``, for whole texts ``[s, b]``. An n-gram ends with a text before it."""
        heads = zip(
            self.rows_of_heads.split(self.ngrams.heads), self.starts_of_heads.split(self.ngrams.heads), strict=True
        )
        before, mixed, of_orders = tokens, tokens * self.multipliers[0], []
        for shift, (rows, starts) in enumerate(heads, 1):
            moved = F.pad(tokens, (0, 0, shift, 0), value=self._end)[: len(tokens)]
            before = moved if shift == 1 else moved.where(before != self._end, self._end)
            mixed = mixed ^ (before * self.multipliers[shift])
            of_orders.append(mixed.unsqueeze(-1).remainder(rows) + starts)
        return torch.cat(of_orders, -1)


class NGramConv(CausalConv):
    """A causal convolution of each channel, before SiLU, over tokens that are some tokens apart."""

    def __init__(self, config: Any, channels: int, kernel: int, distance: int) -> None:
        super().__init__(config, channels, kernel, distance=distance, sequence_parallel=config.sequence_parallel)
        if config.perform_initialization:
            nn.init.zeros_(self.weight)

    def forward(self, tokens: Tensor, first: int, text: Text) -> Tensor:
        """``[s, b, n]``, the tokens of this CP rank in n channels from ``first`` on."""
        return F.silu(self.convolved(tokens, first, text, copied=False)).to(tokens.dtype)


def multipliers(vocabulary: int, how_many: int, seed: int) -> list[int]:
    """The odd factors of hashes: so small that a product with a token fits into 64 bits, drawn by SplitMix64."""
    half = max(1, ((1 << 63) - 1) // max(vocabulary, 1) // 2)
    return [2 * (_drawn(seed + _GOLDEN * index) % half) + 1 for index in range(1, how_many + 1)]


def _drawn(state: int) -> int:
    """The number that SplitMix64 draws in this state."""
    state = (state + _GOLDEN) & _MASK
    state = ((state ^ (state >> 30)) * _FIRST) & _MASK
    state = ((state ^ (state >> 27)) * _SECOND) & _MASK
    return state ^ (state >> 31)
