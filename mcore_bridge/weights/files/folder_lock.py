"""One writer at a time for a folder: a lock file in it that says who writes, and whose age tells whether it still does.

A writer on the same machine is judged by its process: its number and the time when it started. Of any other, only the
lock's age is known: a thread renews it every ``BEAT`` seconds, and after ``STALE`` seconds it counts for nothing.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mcore_bridge.errors import CheckpointError
from mcore_bridge.machine import is_alive, start_time, this_machine

PREFIX = ".mcore_bridge."
"""How everything begins that a save puts into its target besides the result."""
LOCK = f"{PREFIX}lock"
BEAT = 20.0
"""Seconds between two signs of life."""
STALE = 600.0
"""Seconds after which the lock of a writer on another machine is taken over."""


@dataclass(frozen=True, slots=True)
class Writer:
    """Who holds a lock. ``token`` is unique to one save."""

    token: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    machine: str = field(default_factory=this_machine)
    started: str = field(default_factory=lambda: start_time(os.getpid()))
    since: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M:%S%z"))

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (since {self.since})"

    @property
    def is_here(self) -> bool:
        """Whether it runs, or ran, where this process could see it."""
        return bool(self.machine) and self.machine == this_machine()


@contextmanager
def locked(folder: Path) -> Iterator[Writer]:
    """Hold the lock of a folder, which is made where it is not there, and removed again if it stays empty.

    Raises:
        CheckpointError: another writer holds it, or may hold it; the message names it, and the file to remove.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    own = Writer()
    _acquire(folder, own)
    stop = threading.Event()
    beats = threading.Thread(target=_beat, args=(folder / LOCK, own, stop), daemon=True, name=f"lock of {folder}")
    beats.start()
    try:
        yield own
    finally:
        stop.set()
        beats.join()
        if _holder(folder) == own:
            (folder / LOCK).unlink(missing_ok=True)
        for path in missing:  # the innermost first
            with suppress(OSError):  # it has files by now
                path.rmdir()


def require_held(folder: Path, own: Writer | None) -> None:
    """Raise where the lock has been taken from ``own`` meanwhile, as from a machine that was suspended for long."""
    if (holder := _holder(folder)) != own:
        who = f"{holder} holds it now" if holder else "nobody holds it now"
        raise CheckpointError(f"the lock {folder / LOCK} was lost while {own} wrote: {who}; save again")


def _acquire(folder: Path, own: Writer) -> None:
    path, text = folder / LOCK, json.dumps(asdict(own)).encode()
    while True:
        folder.mkdir(parents=True, exist_ok=True)  # again, if another writer has made it, failed and removed it
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            _take_over(folder, own)
            continue
        except FileNotFoundError:
            continue
        try:
            os.write(file, text)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(file)
        return


def _take_over(folder: Path, own: Writer) -> None:
    """Remove the lock of a writer that is dead.

    Raises:
        CheckpointError: it is not dead, or nobody can tell.
    """
    path = folder / LOCK
    holder = _holder(folder, patience=1.0)
    if holder is None:
        if path.exists():
            raise CheckpointError(f"{path} does not say who writes to {folder}: remove it if nobody does")
        return
    if holder.is_here:
        if is_alive(holder.pid, holder.started):
            raise CheckpointError(
                f"{holder} writes to {folder}: wait for its end, or name another folder. If that process does "
                f"something else, remove {path}"
            )
    elif (age := _age(path, own)) < STALE:
        raise CheckpointError(
            f"{holder} writes to {folder}, and gave a sign of life {age:.0f} s ago: wait for its end, or name another "
            f"folder. If it is dead, remove {path}, or try again when the last sign is {STALE:.0f} s old"
        )
    apart = folder / f"{PREFIX}{own.token}.stale"
    try:
        path.rename(apart)
    except FileNotFoundError:
        return
    if _read(apart) != holder:  # another process was faster, and this is its lock
        with suppress(OSError):
            os.link(apart, path)
    apart.unlink(missing_ok=True)


def _holder(folder: Path, patience: float = 0.0) -> Writer | None:
    """Who holds the lock; None where nobody does, or where it is not readable after ``patience`` seconds."""
    path, end = folder / LOCK, time.monotonic() + patience
    while True:
        holder = _read(path)
        if holder is not None or not path.exists() or time.monotonic() > end:
            return holder
        time.sleep(0.05)  # it may be in the making


def _read(path: Path) -> Writer | None:
    try:
        return Writer(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _age(path: Path, own: Writer) -> float:
    """Seconds since the last sign of life, by the clock of the file system: those of machines differ."""
    probe = path.with_name(f"{PREFIX}{own.token}.probe")
    try:
        probe.touch(exist_ok=False)
        return probe.stat().st_mtime - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
    finally:
        probe.unlink(missing_ok=True)


def _beat(path: Path, own: Writer, stop: threading.Event) -> None:
    while not stop.wait(BEAT):
        with suppress(OSError):
            if _read(path) == own:
                os.utime(path)
