"""Whether engines are right: what they say of prompts, and which bits they hold, beside what the trainer has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from mcore_bridge.arguments import FLAG, Kind, problem_of
from mcore_bridge.errors import TransferError
from mcore_bridge.factory.adapter_sets import without_adapters
from mcore_bridge.sync.clients import log_probs_of
from mcore_bridge.sync.log_probs import (
    EngineDifference,
    LogProbs,
    Prompts,
    Rows,
    difference,
    of_trainer,
    prompts_of,
    rows_of,
)
from mcore_bridge.weights.model_chunks import Models, adapters_in_use
from mcore_bridge.weights.transfer.collectives import Group
from mcore_bridge.weights.transfer.failures import raise_on_all

_ATOL = Kind(
    "a number of at least 0", lambda value: isinstance(value, int | float) and value >= 0, "pass a number such as 0.01"
)
ALL_GO_ON = "expected all ranks to go on, found"
"""What it means if one rank fails."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What rank 0 asks to verify, and what engines said of the prompts."""

    prompts: Prompts
    by_engine: Mapping[int, Rows]
    weights: bool
    atol: float | None


def asked(
    clients: Mapping[int, object], prompts: object, log_probs: object, weights: bool, atol: float | None, seconds: float
) -> Asked:
    """Check the arguments of ``WeightSync.verify``, and ask the engines.

    Raises:
        TransferError: when an argument is wrong, or an engine gives no log-probabilities.
    """
    if wrong := problem_of(weights=(weights, FLAG), atol=(atol, _ATOL.or_none())):
        raise TransferError(wrong)
    rows = prompts_of(prompts)
    if not rows:
        if not weights:
            raise TransferError("expected prompts whose log-probs to compare, or weights=True, found neither")
        return Asked((), {}, weights, atol)
    functions = _functions(clients, seconds) if log_probs is None else {next(iter(clients), 0): _function(log_probs)}
    return Asked(rows, {n: rows_of(n, rows, function(rows)) for n, function in functions.items()}, weights, atol)


def _function(log_probs: object) -> LogProbs:
    return log_probs if callable(log_probs) else lambda prompts: log_probs


def _functions(clients: Mapping[int, object], seconds: float) -> dict[int, LogProbs]:
    functions = {engine: log_probs_of(client, seconds) for engine, client in clients.items()}
    if silent := [engine for engine, function in functions.items() if function is None]:
        raise TransferError(
            f"expected engines that give log-probs of prompts, as vLLM does, found that the engines {silent} do not: "
            "pass log_probs=, or give the client a method log_probs"
        )
    if not functions:
        raise TransferError("expected an engine to verify, found none: pass engines to WeightSync, or log_probs=")
    return {engine: function for engine, function in functions.items() if function is not None}


def given_by_first(group: Group, ask: Callable[[], Asked]) -> Asked:
    """What rank 0 asks to verify, on all ranks of the trainer."""
    own: Asked | None = None
    with raise_on_all(group, ALL_GO_ON, TransferError):
        own = ask() if group.rank == 0 else None
    given = group.all_gather_object(own)[0]
    assert given is not None
    return given


def differences_of(
    group: Group, models: Models, given: Asked, is_base: bool, options: Mapping[str, Any]
) -> tuple[EngineDifference, ...]:
    """Compute the trainer's log-probabilities, and compare. All ranks of the trainer call this together.

    Args:
        is_base: whether the engines have the base without adapters.
        options: as for ``forward``.
    """
    if not given.prompts:
        return ()
    with without_adapters(models) if is_base and adapters_in_use(models) else nullcontext():
        of_models = of_trainer(models, given.prompts, **options)
    differences = tuple(difference(engine, given.prompts, rows, of_models) for engine, rows in given.by_engine.items())
    first: tuple[EngineDifference, ...] = group.all_gather_object(differences)[0]
    return first
