"""One process per rank, started from here: what each of them returns, or one error that says what went wrong where.

What ranks print goes to a file that only a crash shows. The first failure ends all of them: nobody is left waiting.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mcore_bridge.errors import BridgeError, MeshError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

A = TypeVar("A")
T = TypeVar("T")

Report = Callable[[str, int, int], None]
"""How far a rank is: what it does, how much of it is done, and how much there is."""
OnEvent = Callable[[int, str, int, int], None]
"""The same, with the rank in front."""

_GRACE = 3.0  # seconds in which other ranks may still say what they think of a failure
_QUIET = 0.1  # seconds between two reports of one rank


class RankError(BridgeError, RuntimeError):
    """A rank failed or died; the message says which and why, ``details`` holds tracebacks and what it printed."""

    def __init__(self, message: str, details: str) -> None:
        super().__init__(message)
        self.details = details


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rank did not return, and all that is known of it."""

    message: str
    details: str


@dataclass(frozen=True, slots=True)
class Job:
    """What a new process must know to be one rank. The process group's store is a file in ``folder``."""

    rank: int
    world_size: int
    device: str
    folder: str

    @property
    def log(self) -> Path:
        """What the rank printed."""
        return Path(self.folder) / f"rank-{self.rank}.log"


def run_ranks(
    function: Callable[[A, Report], T], argument: A, *, world_size: int, device: str, on_event: OnEvent
) -> list[T]:
    """``function(argument, report)`` on every rank of a new process group: what each returned, by rank.

    Args:
        function: importable by name; finds torch.distributed initialised, and no ``parallel_state``.
        argument: picklable.
        device: "cpu" (gloo), or "cuda" (nccl, rank ``i`` on GPU ``i``).
        on_event: told, in this process, what ranks report.

    Raises:
        MeshError: fewer GPUs than ranks.
        RankError: a rank raised, or died.
    """
    _require_gpus(device, world_size)
    with tempfile.TemporaryDirectory(prefix="mcore-bridge-") as folder, _environment(device):
        jobs = [Job(rank, world_size, device, folder) for rank in range(world_size)]
        with _started(jobs, function, argument) as pipes:
            outcomes = _collect(pipes, on_event)
        failures = {rank: outcome for rank, outcome in sorted(outcomes.items()) if isinstance(outcome, Failure)}
        if failures:
            raise _error(failures, jobs)
        return [outcomes[rank] for rank in range(world_size)]


def _require_gpus(device: str, world_size: int) -> None:
    if device != "cuda":
        return
    import torch

    found = torch.cuda.device_count()
    if found < world_size:
        raise MeshError(
            f"device cuda needs one GPU for each of the {world_size} ranks, found {found}: change the mesh, or use cpu"
        )


@contextlib.contextmanager
def _environment(device: str) -> Iterator[None]:
    """On CPU no rank may see a GPU: megatron-core would use it."""
    before = dict(os.environ)
    os.environ.update(PYTHONWARNINGS="ignore", TOKENIZERS_PARALLELISM="false")
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _started(
    jobs: Sequence[Job], function: Callable[[A, Report], T], argument: A
) -> Iterator[dict[Connection, tuple[int, Any]]]:
    """Processes that end with the block. On CPU they are forked from a server that has imported torch once."""
    context: Any = multiprocessing.get_context("forkserver" if jobs[0].device == "cpu" else "spawn")
    if jobs[0].device == "cpu":
        context.set_forkserver_preload(["mcore_bridge.commands.preload"])
    pipes: dict[Connection, tuple[int, Any]] = {}
    try:
        for job in jobs:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_serve, args=(theirs, job, function, argument), daemon=True)
            process.start()
            theirs.close()
            pipes[ours] = (job.rank, process)
        yield pipes
    finally:
        for _, process in pipes.values():
            process.kill()
            process.join()


def _collect(pipes: dict[Connection, tuple[int, Any]], on_event: OnEvent) -> dict[int, Any]:
    """What each rank returned or why it did not; once one failed, the others have little time left."""
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
        return Failure(f"died with exit code {exitcode}", "")
    hint = ": out of memory?" if -exitcode == signal.SIGKILL else ""
    return Failure(f"died of {signal.Signals(-exitcode).name}{hint}", "")


def _error(failures: dict[int, Failure], jobs: Sequence[Job]) -> RankError:
    """One error of all failures; ranks that failed alike share a line."""
    alike: dict[str, list[int]] = {}
    for rank, failure in failures.items():
        alike.setdefault(failure.message, []).append(rank)
    lines = [f"rank {', '.join(map(str, ranks))} of {len(jobs)}: {message}" for message, ranks in alike.items()]
    details = [
        f"--- rank {rank}\n{failure.details}\n{jobs[rank].log.read_text(errors='replace')[-4000:]}"
        for rank, failure in failures.items()
    ]
    return RankError("\n".join(lines), "\n".join(details))


def _serve(pipe: Connection, job: Job, function: Callable[[A, Report], T], argument: A) -> None:
    """The life of one rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    log = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    outcome: Any
    try:
        _join(job)
        outcome = function(argument, _reporter(pipe))
    except BridgeError as error:
        outcome = Failure(str(error), traceback.format_exc())
    except BaseException as error:  # whatever it is, the parent must hear of it
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}:{place.lineno}"
        outcome = Failure(f"{type(error).__name__} in {where}: {error}", traceback.format_exc())
    pipe.send(("outcome", outcome))
    pipe.close()
    os._exit(0)  # the group is not destroyed: that would wait for ranks which may be gone


def _join(job: Job) -> None:
    import torch
    import torch.distributed as dist

    backend = "gloo"
    if job.device == "cuda":
        torch.cuda.set_device(job.rank)
        backend = "nccl"
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // job.world_size))
    path = str(Path(job.folder) / "store")
    store = dist.FileStore(path, job.world_size)  # type: ignore[attr-defined]  # public, not re-exported by name
    dist.init_process_group(backend, store=store, rank=job.rank, world_size=job.world_size)


def _reporter(pipe: Connection) -> Report:
    last: dict[str, float] = {}

    def report(phase: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done >= total or now - last.get(phase, 0.0) > _QUIET:
            last[phase] = now
            pipe.send(("event", (phase, done, total)))

    return report
