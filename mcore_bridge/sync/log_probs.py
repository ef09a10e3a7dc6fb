"""How far an engine's log-probabilities are from the trainer's, token by token."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from numbers import Integral, Real
from typing import Any

import torch

from mcore_bridge.batches.forward import forward
from mcore_bridge.errors import TransferError, shown
from mcore_bridge.weights.model_chunks import Models, chunks_of

Prompts = Sequence[Sequence[int]]
"""Token ids of each prompt."""
Rows = Sequence[Sequence[float]]
"""For each prompt the log-probabilities of its last tokens."""


@dataclass(frozen=True, slots=True)
class TokenLogProbs:
    """The log-probability of one token, given the tokens before it, by engine and trainer."""

    prompt: int
    """The number of the prompt."""
    position: int
    """The token's place in its prompt; 0 is the first token."""
    token: int
    """The id of the token."""
    engine: float
    """The engine's value."""
    trainer: float
    """The trainer's value."""

    @property
    def distance(self) -> float:
        """The absolute difference; infinite if one of them is no number."""
        distance = abs(self.engine - self.trainer)
        return math.inf if math.isnan(distance) else distance


@dataclass(frozen=True, slots=True)
class Difference:
    """How far the log-probabilities of some tokens are apart."""

    tokens: tuple[TokenLogProbs, ...] = field(repr=False)
    """In the order of prompts and positions."""

    @property
    def mean(self) -> float:
        """The mean of the absolute differences."""
        return sum(token.distance for token in self.tokens) / len(self.tokens)

    @property
    def worst(self) -> TokenLogProbs:
        """The token with the largest absolute difference."""
        return max(self.tokens, key=lambda token: token.distance)

    @property
    def kl(self) -> float:
        """The mean of ``r - 1 - log r``, where ``r`` is the trainer's probability divided by the engine's.

        This is the estimator k3 of the divergence KL(engine || trainer), for tokens that the engine has sampled. For
        other tokens it is just a number that is 0 if all log-probabilities are equal.
        """
        logs = torch.tensor([token.trainer - token.engine for token in self.tokens], dtype=torch.float64)
        return float((logs.expm1() - logs).mean())

    def __str__(self) -> str:
        """One line."""
        worst = self.worst
        return (
            f"log-probs of {len(self.tokens)} tokens are {self.mean:.1e} apart on average, {worst.distance:.1e} at "
            f"worst (prompt {worst.prompt}, position {worst.position}, token {worst.token}: engine "
            f"{worst.engine:.4f}, trainer {worst.trainer:.4f}), KL {self.kl:.1e} (k3)"
        )


@dataclass(frozen=True, slots=True)
class EngineDifference(Difference):
    """How far the log-probabilities of one engine are from the trainer's."""

    engine: int = 0
    """The number of the engine, as ``WeightSync`` was given them."""

    @property
    def by_position(self) -> dict[range, Difference]:
        """The tokens at positions 1, 2 to 3, 4 to 7, 8 to 15 and so on.

        A wrong rope or window shows at late positions only; a wrong weight at all.
        """
        ordered = sorted(self.tokens, key=lambda token: token.position)
        stretches = groupby(ordered, lambda token: token.position.bit_length())
        return {range(1 << bits >> 1, 1 << bits): Difference((*tokens,)) for bits, tokens in stretches}

    def __str__(self) -> str:
        """One line."""
        return f"engine {self.engine}: {Difference.__str__(self)}"


def prompts_of(given: object) -> Prompts:
    """Lists of token ids.

    Raises:
        TransferError: for anything else, and for a prompt without a token that follows another one.
    """
    rows = [_listed(row) for row in given] if isinstance(given, Iterable) else None
    if rows is None or not all(_are_tokens(row) for row in rows):
        raise TransferError(
            "prompts must be lists of at least two token ids each, or an int64 tensor [batch, seq] without padding, "
            f"found {shown(given)}"
        )
    return [[*map(int, row)] for row in rows]


def _listed(row: object) -> list[Any]:
    """The entries of a list, a tensor or an array."""
    listed = row.tolist() if isinstance(row, torch.Tensor) else row
    return [*listed] if isinstance(listed, Iterable) else [listed]


def _are_tokens(row: Sequence[object]) -> bool:
    return len(row) > 1 and all(isinstance(token, Integral) and int(token) >= 0 for token in row)


def of_trainer(models: Models, prompts: Prompts, **options: Any) -> Rows:
    """The trainer's log-probabilities of all tokens but the first. All ranks of a replica call it together.

    The forward is that of eval mode.

    Args:
        options: as for ``forward``. Without them a microbatch is one prompt, since logits of all may take much memory.

    Raises:
        BatchError: as ``forward``.
    """
    device = next(parameter.device for chunk in chunks_of(models) for parameter in chunk.parameters())
    width = max(map(len, prompts))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in prompts], device=device)
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in prompts], device=device)
    modules = [module for chunk in chunks_of(models) for module in chunk.modules() if module.training]
    try:
        for module in modules:
            module.training = False
        values = forward(models, ids, mask, **{"micro_batch_size": 1, **options}).log_probs
    finally:
        for module in modules:
            module.training = True
    if values is None:
        raise TransferError("expected models with an LM head, found another head: they have no log-probs to compare")
    return [row[1 : len(prompt)] for row, prompt in zip(values.tolist(), prompts, strict=True)]


def rows_of(engine: int, prompts: Prompts, values: object) -> Rows:
    """What an engine said of prompts, as numbers for the last tokens of each. The first token has none.

    Raises:
        TransferError: for anything else.
    """
    rows = [_listed(row) for row in values] if isinstance(values, Iterable) else []
    if len(rows) != len(prompts):
        raise TransferError(
            f"expected log-probs of {len(prompts)} prompts by engine {engine}, found {shown(values)}: give one row of "
            "numbers for each prompt"
        )
    for number, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        if len(row) == len(prompt):
            del row[0]
        if not 0 < len(row) < len(prompt) or not all(isinstance(value, Real) for value in row):
            raise TransferError(
                f"expected log-probs of the last tokens of prompt {number} by engine {engine}, at most "
                f"{len(prompt) - 1} numbers, found {shown(row)}"
            )
    return [[*map(float, row)] for row in rows]


def difference(engine: int, prompts: Prompts, of_engine: Rows, of_trainer: Rows) -> EngineDifference:
    """Compare what an engine said of prompts with what the trainer says."""
    tokens = (
        TokenLogProbs(number, position, prompt[position], value, own[position - 1])
        for number, (prompt, row, own) in enumerate(zip(prompts, of_engine, of_trainer, strict=True))
        for position, value in enumerate(row, len(prompt) - len(row))
    )
    return EngineDifference((*tokens,), engine)


LogProbs = Callable[[Prompts], object]
"""A function that asks an engine: it returns for each prompt the log-probabilities of its last tokens."""
