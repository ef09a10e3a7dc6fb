"""A lock file, with which at most one process writes to a folder. It names the writer, and its age shows whether the
writer is alive.

A writer on this machine is alive if its process is alive. The process is identified by its id and start time. For a
writer on another machine only the age of the lock is available. A thread renews the lock every ``BEAT`` seconds; after
``STALE`` seconds without renewal it is invalid.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mcore_bridge.errors import CheckpointError
from mcore_bridge.foreign_files import read_json
from mcore_bridge.machine import is_alive, start_time, this_machine

PREFIX = ".mcore_bridge."
"""Prefix of all temporary files and folders of a save in its target."""
LOCK = f"{PREFIX}lock"
BEAT = 20.0
"""Seconds between two renewals of a lock."""
STALE = 600.0
"""Age in seconds at which the lock of a writer on another machine is taken over."""
_LOCK_BYTES = 4096
"""More bytes than any lock has."""


@dataclass(frozen=True, slots=True)
class Writer:
    """The process that holds a lock. ``token`` is unique to one save."""

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
        """Whether its process runs or ran on this machine, so that this process can check it."""
        return bool(self.machine) and self.machine == this_machine()


@contextmanager
def locked(folder: Path) -> Iterator[Writer]:
    """Hold the lock of a folder. A missing folder is created, and removed again if it stays empty.

    Raises:
        CheckpointError: another writer holds it, or may hold it. The message names the writer, and the file to remove.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    own = Writer()
    try:
        _acquire(folder, own)
    except BaseException:
        _remove_empty(missing)
        raise
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
        _remove_empty(missing)


def _remove_empty(folders: Iterable[Path]) -> None:
    """Remove the folders that were created, the innermost first, up to a folder with files."""
    for path in folders:
        with suppress(OSError):
            path.rmdir()


def require_held(folder: Path, own: Writer | None) -> None:
    """Raise if ``own`` has lost the lock to another writer, for example after its machine was suspended."""
    if (holder := _holder(folder)) != own:
        who = f"{holder} holds the lock now" if holder else "no process holds the lock now"
        raise CheckpointError(f"the lock {folder / LOCK} was lost while {own} wrote: {who}; save again")


def _acquire(folder: Path, own: Writer) -> None:
    path, named = folder / LOCK, folder / f"{PREFIX}{own.token}.named"
    try:
        while True:
            folder.mkdir(parents=True, exist_ok=True)  # try again if another writer has made it, failed and removed it
            try:
                named.write_text(json.dumps(asdict(own)))
                _create(path, named)
            except FileExistsError:
                _take_over(folder, own)
            except FileNotFoundError:
                continue
            else:
                return
    finally:
        named.unlink(missing_ok=True)


def _create(path: Path, named: Path) -> None:
    """Create a lock with the text of ``named``, at once, so that a writer that is killed leaves no lock without a name.

    Raises:
        FileExistsError: there is a lock.
        FileNotFoundError: there is no folder.
    """
    try:
        os.link(named, path)
    except (FileExistsError, FileNotFoundError):
        raise
    except OSError:  # a file system without links
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            os.write(file, named.read_bytes())
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(file)


def _take_over(folder: Path, own: Writer) -> None:
    """Remove the lock of a dead writer.

    Raises:
        CheckpointError: the writer is alive, or may be.
    """
    path = folder / LOCK
    holder = _holder(folder, patience=1.0)
    if holder is None:
        if os.path.lexists(path):  # a link that points to nothing also blocks
            raise CheckpointError(f"{path} does not name the writer of {folder}: remove it if no process writes there")
        return
    if holder.is_here:
        if is_alive(holder.pid, holder.started):
            raise CheckpointError(
                f"{holder} writes to {folder}: wait for its end, or name another folder. If that process is not a "
                f"save, remove {path}"
            )
    elif (age := _age(path, own)) < STALE:
        raise CheckpointError(
            f"{holder} writes to {folder}, and renewed its lock {age:.0f} s ago: wait for its end, or name another "
            f"folder. If it is dead, remove {path}, or try again when the lock is {STALE:.0f} s old"
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
    """The holder of the lock; None if there is none, or if the lock is not readable after ``patience`` seconds."""
    path, end = folder / LOCK, time.monotonic() + patience
    while True:
        holder = _read(path)
        if holder is not None or not os.path.lexists(path) or time.monotonic() > end:
            return holder
        time.sleep(0.05)  # its writer may not have finished it


def _read(path: Path) -> Writer | None:
    """The writer in a lock file; None if the file is no lock, because another program put it there."""
    try:
        fields = read_json(path, most=_LOCK_BYTES)
    except CheckpointError:
        return None
    kinds = {name: int if name == "pid" else str for name in Writer.__dataclass_fields__}
    given = {name: type(value) for name, value in fields.items()} if isinstance(fields, dict) else None
    is_text = given == kinds and all(str(value).isprintable() for value in fields.values())
    return Writer(**fields) if is_text else None


def _age(path: Path, own: Writer) -> float:
    """Seconds since the lock was renewed, by the clock of the file system: the clocks of machines differ."""
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
