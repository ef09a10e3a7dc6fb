"""Whether engines are right: what they say of prompts, and which bits they hold, beside what the trainer has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from mcore_bridge.arguments import FLAG, Kind, problem_of
from mcore_bridge.errors import TransferError
from mcore_bridge.factory.reference import without_adapters
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
from mcore_bridge.weights.engine.comparison import Compared
from mcore_bridge.weights.model_chunks import Models
from mcore_bridge.weights.peft.hf_adapters import adapters_in_use
from mcore_bridge.weights.transfer.collectives import Group
from mcore_bridge.weights.transfer.failures import raise_on_all

_ATOL = Kind("a number of at least 0", lambda value: isinstance(value, int | float) and value >= 0)
_FAILED = "expected all ranks to go on, found"
_FEW = 4
"""Wrong slices that one line names."""


@dataclass(frozen=True, slots=True)
class WorkerWeights:
    """Whether one worker of an engine holds the trainer's weights, bit for bit."""

    engine: int
    """The number of the engine, as ``WeightSync`` was given them."""
    rank: int
    """The worker's number among those of the engine."""
    name: str
    """Engine, release, model, and the worker's place in the engine's mesh."""
    compared: Compared | None
    """What was found; None if the worker has no map of its loader, so that nothing was compared."""
    problem: str = ""
    """Why the comparison failed."""

    def __str__(self) -> str:
        """One line."""
        who = f"worker {self.rank} of engine {self.engine}"
        if self.compared is None:
            return f"{who}: weights not compared, since its loader takes all of them"
        wrong, left_out = self.compared.wrong, len(self.compared.left_out)
        others = f", {left_out} that only its loader makes not compared" if left_out else ""
        if not wrong:
            return f"{who}: {self.compared.num_tensors} tensors equal in every bit{others}"
        number = len({entry.tensor for entry in wrong})
        rest = f"; and {len(wrong) - _FEW} more slices" if len(wrong) > _FEW else ""
        shown = "; ".join(map(str, wrong[:_FEW]))
        return f"{who}: {number} of {self.compared.num_tensors} tensors differ ({shown}{rest}){others}"


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What ``WeightSync.verify`` found. It is equal on all ranks of the trainer. ``print`` shows a line for each
    engine, and for each worker whose weights were compared.
    """

    version: int
    """The version of the last round."""
    log_probs: tuple[EngineDifference, ...]
    """For each engine how far its log-probabilities are from the trainer's."""
    weights: tuple[WorkerWeights, ...]
    """For each worker whether its weights are the trainer's; empty if they were not compared."""

    def __str__(self) -> str:
        return "\n".join(f"version {self.version}, {part}" for part in (*self.log_probs, *self.weights))

    def within(self, atol: float | None) -> VerifyReport:
        """The report itself.

        Raises:
            TransferError: when a log-probability is further apart than ``atol``, or a weight differs.
        """
        if atol is not None and (wrong := [*self._beyond(atol)]):
            raise TransferError(f"expected log-probs within {atol} and equal weights, found: {'; '.join(wrong)}")
        return self

    def _beyond(self, atol: float) -> Iterator[str]:
        for engine in self.log_probs:
            if engine.worst.distance > atol:
                yield str(engine)
        for worker in self.weights:
            if worker.compared is not None and worker.compared.wrong:
                yield str(worker)


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
    with raise_on_all(group, _FAILED, TransferError):
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
