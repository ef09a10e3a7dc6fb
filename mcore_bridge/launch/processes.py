"""Starts one process per rank, and returns the results of all ranks, or raises one error that names the failed rank.

The output of ranks goes to a file, which is shown only after a crash. The first failure ends all ranks, so that none
waits forever. ``torch.multiprocessing`` starts processes, too, but cannot report their progress.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from mcore_bridge.errors import BridgeError, MeshError
from mcore_bridge.launch.worker import Cause, Failure, Job, Report, serve, variables

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

A = TypeVar("A")
T = TypeVar("T")

OnEvent = Callable[[int, str, int, int], None]
"""A function that gets the reports of ranks: the rank, and then the arguments of ``Report``."""

_GRACE = 3.0  # seconds for other ranks to report after the first failure


class RankError(BridgeError, RuntimeError):
    """A rank failed or died. The message names the rank and the reason; ``details`` has tracebacks and the output."""

    def __init__(self, message: str, details: str) -> None:
        super().__init__(message)
        self.details = details


def run_ranks(
    function: Callable[[A, Report], T], argument: A, *, world_size: int, device: str, on_event: OnEvent
) -> list[T]:
    """Call ``function(argument, report)`` on every rank of a new process group, and return the results by rank.

    Args:
        function: a function that can be imported by name. torch.distributed is initialised for it, and
            ``parallel_state`` is not.
        argument: a value that can be pickled.
        device: "cpu" (gloo), or "cuda" (nccl, rank ``i`` on GPU ``i``).
        on_event: called in this process with the reports of ranks.

    Raises:
        MeshError: there are fewer GPUs than ranks.
        RankError: a rank raised, or died.
    """
    _require_gpus(device, world_size)
    with tempfile.TemporaryDirectory(prefix="mcore-bridge-") as folder, _environment(device):
        jobs = [Job(rank, world_size, device, folder) for rank in range(world_size)]
        with _started(jobs, function, argument) as pipes:
            outcomes = _collect(pipes, on_event)
        failures = {rank: outcome for rank, outcome in outcomes.items() if isinstance(outcome, Failure)}
        if failures:
            raise _error(failures, jobs)
        return [outcomes[rank] for rank in range(world_size)]


def _require_gpus(device: str, world_size: int) -> None:
    if device != "cuda":
        return
    import torch

    visible = torch.cuda.device_count()
    if visible < world_size:
        raise MeshError(
            f'device "cuda" needs a GPU for each of the {world_size} ranks, found {visible}: change the mesh, or use '
            '"cpu"'
        )


@contextlib.contextmanager
def _environment(device: str) -> Iterator[None]:
    """Set the environment variables of the ranks in the block, in which they are started."""
    before = dict(os.environ)
    os.environ.update(variables(device))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _started(
    jobs: Sequence[Job], function: Callable[[A, Report], T], argument: A
) -> Iterator[dict[Connection, tuple[int, Any]]]:
    """Start processes, which end with the block. On CPU they are forked from a server that has imported torch once."""
    context: Any = multiprocessing.get_context("forkserver" if jobs[0].device == "cpu" else "spawn")
    if jobs[0].device == "cpu":
        context.set_forkserver_preload(["mcore_bridge.launch.preload"])
    pipes: dict[Connection, tuple[int, Any]] = {}
    try:
        for job in jobs:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=serve, args=(theirs, job, function, argument), daemon=True)
            process.start()
            theirs.close()
            pipes[ours] = (job.rank, process)
        yield pipes
    finally:
        for _, process in pipes.values():
            process.kill()
            process.join()


def _collect(pipes: dict[Connection, tuple[int, Any]], on_event: OnEvent) -> dict[int, Any]:
    """The result or the failure of each rank. After the first failure, the other ranks have ``_GRACE`` seconds."""
    outcomes: dict[int, Any] = {}
    waiting = dict(pipes)
    deadline: float | None = None
    while waiting and (deadline is None or time.monotonic() < deadline):
        for ready in multiprocessing.connection.wait(list(waiting), 0.2 if deadline else None):
            pipe: Any = ready
            rank, process = waiting[pipe]
            try:
                kind, value = pipe.recv()
            except (EOFError, OSError):
                process.join(_GRACE)
                kind, value = "outcome", _death(process.exitcode)
            if kind == "event":
                on_event(rank, *value)
                continue
            outcomes[rank] = value
            del waiting[pipe]
            if isinstance(value, Failure) and deadline is None:
                deadline = time.monotonic() + _GRACE
    return outcomes


def _death(exitcode: int | None) -> Failure:
    if exitcode is None or exitcode >= 0:
        return Failure(f"died with exit code {exitcode}", "", Cause.DEATH)
    hint = ": out of memory?" if -exitcode == signal.SIGKILL else ""
    return Failure(f"died of {signal.Signals(-exitcode).name}{hint}", "", Cause.DEATH)


def _error(failures: dict[int, Failure], jobs: Sequence[Job]) -> RankError:
    """The error for the most likely cause; failures of other ranks, such as lost connections, follow from it."""
    first = min(failures.values(), key=lambda failure: failure.cause)
    alike = sorted(rank for rank, failure in failures.items() if failure.message == first.message)
    ranks = f"all {len(jobs)} ranks" if len(alike) == len(jobs) else f"rank {', '.join(map(str, alike))} of {len(jobs)}"
    details = [
        f"--- rank {rank}: {failure.message}\n{failure.details}\n{jobs[rank].log.read_text(errors='replace')[-4000:]}"
        for rank, failure in sorted(failures.items())
    ]
    return RankError(f"{ranks}: {first.message}", "\n".join(details))
