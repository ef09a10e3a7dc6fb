"""The main function of a rank that ``processes.py`` started: it joins the process group, runs, and sends its result."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mcore_bridge.errors import BridgeError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

A = TypeVar("A")
T = TypeVar("T")

Report = Callable[[str, int, int], None]
"""A function that reports progress: the name of a phase, how much of it is done, and the total."""

_QUIET = 0.1  # seconds between two reports of one rank


class Cause(IntEnum):
    """The kind of a failure. If several ranks fail, the smallest cause is the real one; then the first report."""

    DEATH = 0
    REFUSAL = 1
    CRASH = 2


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why a rank did not return, with all details."""

    message: str
    details: str
    cause: Cause


@dataclass(frozen=True, slots=True)
class Job:
    """The settings with which a new process becomes a rank. The store of the process group is a file in ``folder``."""

    rank: int
    world_size: int
    device: str
    folder: str

    @property
    def log(self) -> Path:
        """The file with the output of the rank."""
        return Path(self.folder) / f"rank-{self.rank}.log"


def serve(pipe: Connection, job: Job, function: Callable[[A, Report], T], argument: A) -> None:
    """Run one rank from its start to its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    log = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(variables(job.device))  # the server from which this was forked may have other settings
    outcome: Any
    try:
        _join(job)
        outcome = function(argument, _reporter(pipe))
    except BridgeError as error:
        outcome = Failure(str(error), traceback.format_exc(), Cause.REFUSAL)
    except BaseException as error:  # any error must be reported to the parent
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        outcome = Failure(f"{type(error).__name__} in {where}: {error}", traceback.format_exc(), Cause.CRASH)
    pipe.send(("outcome", outcome))
    pipe.close()
    os._exit(0)  # without destroying the group, which would wait for ranks that may have ended


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


def variables(device: str) -> dict[str, str]:
    """The environment variables of ranks. On CPU, GPUs are hidden from ranks, because megatron-core would use them."""
    quiet = {"PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false"}
    return {**quiet, "CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else quiet
