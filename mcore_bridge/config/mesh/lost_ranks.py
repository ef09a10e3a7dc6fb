"""Which rank was lost, as far as those that are left can know.

Each rank notes in the store of its job which process it is. Where a connection breaks, the others look which processes
of their own machine have ended, and note that for the other machines. Nothing is sent as long as all goes well.
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
"""How long the first failure of a job waits for word of who was lost."""
_BROKEN = ("Connection ", "pair closure", "Broken pipe", "remote process exited", "imed out")
"""What gloo and NCCL say where another rank is no longer there, or does not come."""
_deadlines: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()
_noted: weakref.WeakSet[Any] = weakref.WeakSet()


@contextmanager
def naming_lost_ranks(what: str) -> Iterator[None]:
    """What breaks in here because another rank is gone says which one that is, as far as this rank can know.

    Raises:
        LostRankError: in place of what torch raises, which is its cause.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        is_theirs = isinstance(error, dist.DistError) or "/gloo/" in text or "pair closure" in text
        if not is_theirs or not any(words in text for words in _BROKEN):
            raise  # ours, or a caller's, who may have connections of his own
        raise LostRankError(f"{what} failed: {_who()}. torch says: {text.partition('. ')[0]}") from error


def note_process() -> None:
    """Note for the others which process this rank is; once for each default group."""
    world = dist.group.WORLD
    if world is None or world in _noted:
        return
    _noted.add(world)
    with suppress(Exception):  # it only makes a message better
        _Notes().add(this_machine(), f"{dist.get_rank()} {os.getpid()} {start_time(os.getpid())}")


def _who() -> str:
    """What can be known of the ranks that were lost. A store may be lost as well, and is not waited for."""
    found: list[str] = []
    asking = threading.Thread(target=_ask, args=(found, dist.group.WORLD), daemon=True)
    asking.start()
    asking.join(2 * _SECONDS)
    if found:
        names = ", ".join(sorted(found, key=lambda name: int(name.split()[0])))
        return f"of the job's ranks these have ended: {names}. Look there for the cause, and start the job again"
    return (
        "a rank was lost, or did not come. Which one is not known: no process that this rank can see has ended, and no "
        "other rank has told of one. Look for the log that ends first; who only comes late may need a longer timeout"
    )


def _ask(found: list[str], world: Any) -> None:
    """Fill ``found`` as soon as a process has ended here, or was said elsewhere to have ended."""
    with suppress(Exception):
        deadline = _deadlines.setdefault(
            world, time.monotonic() + _SECONDS
        )  # what fails behind the first waits no more
        notes = _Notes()
        while True:
            noted = [entry.split() for entry in notes.of(this_machine())]
            told = set(notes.of("ended"))
            ended = [(rank, pid) for rank, pid, started in noted if not is_alive(int(pid), started)]
            here = {f"{rank} (process {pid} on {socket.gethostname()})" for rank, pid in ended}
            for name in here - told:
                notes.add("ended", name)
            found.extend(here | told)
            if found or time.monotonic() > deadline:
                return
            time.sleep(0.1)


class _Notes:
    """Lists in the store of the job, to which each rank can add."""

    def __init__(self) -> None:
        store = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore("mcore_bridge", store)  # type: ignore[attr-defined]  # public, not re-exported

    def add(self, name: str, entry: str) -> None:
        number = self._store.add(name, 1)
        self._store.set(f"{name}/{number}", entry)

    def of(self, name: str) -> list[str]:
        keys = [f"{name}/{number}" for number in range(1, self._store.add(name, 0) + 1)]
        return [self._store.get(key).decode() for key in keys if self._store.check([key])]
