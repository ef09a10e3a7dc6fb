"""The life of one rank that ``processes`` started: join the group, run, send back what came of it."""

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
"""How far a rank is: what it does, how much of it is done, and how much there is."""

_QUIET = 0.1  # seconds between two reports of one rank


class Cause(IntEnum):
    """Of several ranks that failed, the one with the smallest cause is to blame; then the one that said so first."""

    DEATH = 0
    REFUSAL = 1
    CRASH = 2


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rank did not return, and all that is known of it."""

    message: str
    details: str
    cause: Cause


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


def serve(pipe: Connection, job: Job, function: Callable[[A, Report], T], argument: A) -> None:
    """The life of one rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    log = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(variables(job.device))  # the server that we were forked from may have started before
    outcome: Any
    try:
        _join(job)
        outcome = function(argument, _reporter(pipe))
    except BridgeError as error:
        outcome = Failure(str(error), traceback.format_exc(), Cause.REFUSAL)
    except BaseException as error:  # whatever it is, the parent must hear of it
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}:{place.lineno}"
        outcome = Failure(f"{type(error).__name__} in {where}: {error}", traceback.format_exc(), Cause.CRASH)
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


def variables(device: str) -> dict[str, str]:
    """On CPU no rank may see a GPU: megatron-core would use it."""
    quiet = {"PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false"}
    return {**quiet, "CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else quiet
