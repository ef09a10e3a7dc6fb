"""The entry of a config table for embeddings of n-grams, and the sizes of their tables, which only primes decide."""

import functools
import itertools
import math
from typing import NamedTuple

from mcore_bridge.config.fields import Derive, Field, Hf, Ignore, Mcore, count
from mcore_bridge.config.layer_kinds import sizes_by_layer, values_of_layers
from mcore_bridge.config.tables import GENERATION
from mcore_bridge.errors import ConfigError, shown


class NGrams(NamedTuple):
    """The embeddings of n-grams of a model. Each order of n-grams, from 2 to ``size``, has equally many heads.

    Attributes:
        size: the tokens of the longest n-grams.
        heads: the heads of each order. A head hashes an n-gram to one of its rows.
        width: the dims of all heads of all orders together.
        kernel: the tokens in the convolution of a layer, which are ``size`` tokens apart.
        base: each head has a prime number of rows, of its own, and at least so many.
        divisor: it divides the rows of a layer's table, which has padding behind its last head.
        shards: the number of tensors in files that have the rows of a layer.
        seed: it decides the factors of hashes.
        end: the token that ends a text, or several tokens, of which the first counts.
    """

    size: int
    heads: int
    width: int
    kernel: int
    base: int
    divisor: int
    shards: int
    seed: int
    end: int | tuple[int, ...] | None

    def rows_of_heads(self, number: int) -> tuple[int, ...]:
        """The rows of each head of the layer that is ``number`` (from 0) among those with embeddings of n-grams."""
        heads = (self.size - 1) * self.heads
        return _primes(self.base, (number + 1) * heads)[-heads:]

    def rows(self, number: int) -> int:
        """The rows of the table of this layer, with its padding."""
        return -(-sum(self.rows_of_heads(number)) // self.divisor) * self.divisor

    def rows_of_shards(self, number: int) -> tuple[int, ...]:
        """The rows of each of its tensors in files. There may be fewer than ``shards``, as of ``torch.chunk``."""
        rows = self.rows(number)
        ends = range(step := -(-rows // self.shards), rows + step, step)
        return tuple(min(end, rows) - (end - step) for end in ends)


def _is_prime(number: int) -> bool:
    return all(number % smaller for smaller in range(2, math.isqrt(number) + 1))


@functools.cache
def _primes(start: int, how_many: int) -> tuple[int, ...]:
    """The first primes from ``start`` on.

    >>> _primes(20, 3)
    (23, 29, 31)
    """
    primes = filter(_is_prime, itertools.count(max(start, 2)))
    return tuple(next(primes) for _ in range(how_many))


_SIZES = {
    "size": "ngram_size",
    "heads": "heads_per_ngram",
    "width": "ple_embed_dim",
    "kernel": "ple_conv_kernel_size",
    "base": "ngram_vocab_size_base",
    "divisor": "make_ngram_vocab_size_divisible_by",
    "shards": "split_ngram_parts",
}
_LAYERS, _SEED, _END, _OWN = "ple_layer_ids", "seed", "eos_token_id", "ngram_layer"


def ngrams_of(hf: Hf) -> NGrams:
    """The embeddings of n-grams that a config describes, whether or not a layer has some."""
    seed, end = hf.get(_SEED), hf.get(_END)
    if not isinstance(seed, int):
        raise ConfigError(f"{_SEED} must be a whole number, found {shown(seed)}. Correct the HF config.")
    sizes = {name: count(hf, field) for name, field in _SIZES.items()}
    return NGrams(**sizes, seed=seed, end=tuple(end) if isinstance(end, list) else end)  # type: ignore[arg-type]


def layers_with_ngrams(hf: Hf) -> list[int]:
    """The numbers (from 0) of the layers with embeddings of n-grams. In the HF config, layers are counted from 1."""
    chosen, num_layers = hf.get(_LAYERS) or [], count(hf, "num_hidden_layers")
    if not isinstance(chosen, list) or not all(layer in range(1, num_layers + 1) for layer in chosen):
        raise ConfigError(f"{_LAYERS} must be a list of numbers from 1 to {num_layers}, found {shown(chosen)}.")
    return sorted({layer - 1 for layer in chosen})


def _ngrams(hf: Hf) -> dict[str, object]:
    ngrams, chosen, none = ngrams_of(hf), layers_with_ngrams(hf), {_OWN: None}
    heads = (ngrams.size - 1) * ngrams.heads
    if chosen and (not heads or ngrams.width % heads or ngrams.end in (None, ())):
        raise ConfigError(
            f"with {_LAYERS}, ngram_size must be at least 2, (ngram_size - 1) * heads_per_ngram must divide "
            f"ple_embed_dim={ngrams.width}, and {_END} must be a token; found {ngrams.size}, {heads} and "
            f"{shown(hf.get(_END))}. Correct the HF config."
        )
    layers = [
        {_OWN: chosen.index(layer) if layer in chosen else None} for layer in range(count(hf, "num_hidden_layers"))
    ]
    return {"ngrams": ngrams, **none, "per_layer_config": sizes_by_layer(layers, none)}


def _ngrams_back(mcore: Mcore) -> dict[str, object]:
    ngrams, own = mcore["ngrams"], values_of_layers(mcore, _OWN, count(mcore, "num_layers"))
    assert isinstance(ngrams, NGrams)
    return {
        **{field: getattr(ngrams, name) for name, field in _SIZES.items()},
        _LAYERS: [layer for layer, number in enumerate(own, 1) if number is not None],
        _SEED: ngrams.seed,
        _END: list(ngrams.end) if isinstance(ngrams.end, tuple) else ngrams.end,
    }


NGRAMS: tuple[Field, ...] = (
    Derive(
        (_LAYERS, *_SIZES.values(), _SEED, _END),
        _ngrams,
        _ngrams_back,
        ("`ple_layer_ids` without an `eos_token_id`: n-grams end with a text",),
    ),
    Ignore(GENERATION.reason, tuple(name for name in GENERATION.names if name != _END)),
)
"""Embeddings of n-grams in some layers, or in none."""
