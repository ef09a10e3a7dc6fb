"""What ``WeightSync`` reports of a round and of a verification."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from mcore_bridge.errors import TransferError, plural
from mcore_bridge.sync.log_probs import EngineDifference
from mcore_bridge.sync.routes import Transport
from mcore_bridge.weights.engine.comparison import Compared

_FEW = 4
"""Wrong slices that one line names."""

Target = Literal["policy", "draft"]
"""Which model of an engine gets weights."""


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What one worker of an engine got in a round."""

    engine: int
    """The number of the engine, as ``WeightSync`` was given them."""
    rank: int
    """The worker's number among those of the engine."""
    name: str
    """Engine, release, model, and the worker's place in the engine's mesh."""
    trainer: int
    """The trainer rank that served the worker."""
    transport: Transport | None
    """``"shards"``, ``"pull"``, ``"ring"`` or ``"network"``; None if no way was found."""
    reason: str
    """Why no faster transport was taken; empty for the fastest."""
    num_bytes: int
    """Bytes of HF tensors, or of the slices of HF tensors that the worker uses."""
    seconds: float
    """From the begin of the call on the trainer rank until this worker had the weights."""
    sibling: tuple[int, int] | None = None
    """Engine and rank of the worker with equal weights that passed them on; None if the trainer sent them."""
    problem: str = ""
    """What went wrong; empty if the worker has the new weights."""
    target: Target = "policy"
    """``"policy"`` or ``"draft"``: which model of the engine got weights."""


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What a round did. It is equal on all ranks of the trainer, but for ``seconds``."""

    version: int
    """The number of these weights."""
    seconds: float
    """How long the call took on this rank."""
    workers: tuple[WorkerReport, ...]
    """One report for each worker of each engine."""

    def __str__(self) -> str:
        """One line for a log."""
        if not self.workers:
            return f"version {self.version} in {self.seconds:.3f} s: no engines, nothing sent"
        parts = "; ".join(part for target in get_args(Target) if (part := self._part(target)))
        return f"version {self.version} in {self.seconds:.3f} s: {parts}"

    def _part(self, target: Target) -> str:
        """What one model of all engines got; empty if there is none."""
        workers = [worker for worker in self.workers if worker.target == target]
        if not workers:
            return ""
        ways = sorted({f"{worker.transport}" for worker in workers})
        total = sum(worker.num_bytes for worker in workers) / 1e9
        passed = sum(worker.num_bytes for worker in workers if worker.sibling) / 1e9
        return (
            f"{plural(len(workers), 'worker')}{' of draft models' * (target == 'draft')}, {total:.2f} GB by "
            f"{', '.join(ways)}{f', {passed:.2f} GB of them from siblings' if passed else ''}"
        )


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
    target: Target = "policy"
    """``"policy"`` or ``"draft"``: which model of the engine was compared."""

    def __str__(self) -> str:
        """One line."""
        draft = "draft model of " if self.target == "draft" else ""
        who = f"{draft}worker {self.rank} of engine {self.engine}"
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
        parts = (*self.log_probs, *self.weights) or ("no engines: nothing compared",)
        return "\n".join(f"version {self.version}, {part}" for part in parts)

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
