"""Names the lost rank in an error, if the remaining ranks can find it.

Each rank writes its process id and machine to the store of the job. If a connection breaks, each rank checks which
processes of its machine have ended, and writes the result to the store for the other machines. Before a connection
breaks, nothing is sent.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from mcore_bridge.errors import LostRankError
from mcore_bridge.machine import is_alive, start_time, this_machine

_SECONDS = 3.0
"""How long the first failed rank waits for the number of the lost rank."""
_BROKEN = ("Connection ", "pair closure", "Broken pipe", "remote process exited", "imed out")
"""Parts of error texts of gloo and NCCL, if another rank has ended or is missing."""
_deadlines: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()
_registered: weakref.WeakSet[Any] = weakref.WeakSet()


@contextmanager
def naming_lost_ranks(what: str) -> Iterator[None]:
    """Replace torch's errors about a lost rank by errors with the number of the rank, if it can be found out.

    Args:
        what: a description of the block, for the message.

    Raises:
        LostRankError: another rank has ended or did not come. Its cause is torch's error.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        is_theirs = isinstance(error, dist.DistError) or "/gloo/" in text or "pair closure" in text
        if not is_theirs or not any(words in text for words in _BROKEN):
            raise  # an error of ours, or of a connection that the caller made
        raise LostRankError(f"{what} failed: {_who()}. torch says: {text.partition('. ')[0]}") from error


def note_process() -> None:
    """Writes this rank's process to the store, for the other ranks; once for each default group."""
    world = dist.group.WORLD
    if world is None or world in _registered:
        return
    _registered.add(world)
    with suppress(Exception):  # a failure here only makes a later message less precise
        _Notes().add(this_machine(), f"{dist.get_rank()} {os.getpid()} {start_time(os.getpid())}")


def _who() -> str:
    """The names of lost ranks, or that they are unknown. A thread queries the store, since it may be lost too."""
    lost: list[str] = []
    answered = threading.Event()
    asking = threading.Thread(target=_ask, args=(lost, answered, dist.group.WORLD), daemon=True)
    asking.start()
    asking.join(2 * _SECONDS)
    if lost:
        names = ", ".join(sorted(lost, key=lambda name: int(name.split()[0])))
        return f"these ranks of the job have ended: {names}. Look for the cause in their logs, and start the job again"
    if not answered.is_set():
        return (
            "a rank was lost. Its number is unknown: the store of the job does not answer, so rank 0 or the launcher, "
            "which has it, has probably ended. Look for the log that ends first, and start the job again"
        )
    return (
        "a rank was lost, or did not come. Its number is unknown: no process on this machine has ended, and no other "
        "rank has reported one. Look for the log that ends first. If a rank is only late, set a longer timeout"
    )


def _ask(lost: list[str], answered: threading.Event, world: Any) -> None:
    """Fills ``lost`` as soon as a process on this machine has ended, or another machine has reported one.

    Args:
        answered: set as soon as the store has answered.
    """
    with suppress(Exception):
        deadline = _deadlines.setdefault(world, time.monotonic() + _SECONDS)  # later failures do not wait again
        notes = _Notes()
        while True:
            processes = [entry.split() for entry in notes.of(this_machine())]
            reported = set(notes.of("ended"))
            answered.set()
            ended = [(rank, pid) for rank, pid, started in processes if not is_alive(int(pid), started)]
            here = {f"{rank} (process {pid} on {socket.gethostname()})" for rank, pid in ended}
            for name in here - reported:
                notes.add("ended", name)
            lost.extend(here | reported)
            if lost or time.monotonic() > deadline:
                return
            time.sleep(0.1)


class _Notes:
    """Lists in the store of the job; any rank can append to them."""

    def __init__(self) -> None:
        store = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore("mcore_bridge", store)  # type: ignore[attr-defined]  # public, not re-exported

    def add(self, name: str, entry: str) -> None:
        number = self._store.add(name, 1)
        self._store.set(f"{name}/{number}", entry)

    def of(self, name: str) -> list[str]:
        keys = [f"{name}/{number}" for number in range(1, self._store.add(name, 0) + 1)]
        return [self._store.get(key).decode() for key in keys if self._store.check([key])]
