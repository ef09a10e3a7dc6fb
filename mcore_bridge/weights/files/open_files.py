"""Files that are read or written at offsets. More of them may be in use than a process may have open.

A checkpoint may have thousands of files, and ``ulimit -n`` may be 256. So a file is opened when it is needed. If too
many files are open, the least recently used one is closed. Threads may use files at the same time.
"""

from __future__ import annotations

import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from mcore_bridge.errors import CheckpointError
from mcore_bridge.foreign_files import FULL, open_regular, too_many

Result = TypeVar("Result")
IsFull = Callable[[Exception], bool]
_SHARE = 4
"""We use at most this fraction (1 / _SHARE) of the files that a process may have open: libraries need the rest."""
_MOST = 1 << 16
_changed = threading.Condition(threading.RLock())
_open: OrderedDict[int, OpenFile] = OrderedDict()
"""Open files by the id of the object, in the order of their last use."""


class OpenFile:
    """A file that may be closed and opened again while it is in use.

    Args:
        path: the path of the file.
        flags: the flags to open it again.
        fd: its descriptor, which belongs to this object from now on.
    """

    def __init__(self, path: Path, flags: int, fd: int) -> None:
        self.path, self.flags, self.users = path, flags, 0
        self._fd: int | None = fd
        self._identity = _identity(fd)
        with _changed:
            _open[id(self)] = self
            _close_idle(fd)

    @contextmanager
    def descriptor(self) -> Iterator[int]:
        """A descriptor that stays open in the block. A thread uses one file at a time.

        Raises:
            CheckpointError: the file was closed because too many were open, and another file is at its path now.
            OSError: it cannot be opened again.
        """
        with _changed:
            if self._fd is None:
                self._fd = self._again()
            _open[id(self)] = self
            _open.move_to_end(id(self))
            self.users += 1
            fd = self._fd
            _close_idle(fd)
        try:
            yield fd
        finally:
            with _changed:
                self.users -= 1
                _changed.notify_all()

    def close(self) -> None:
        """Close it. A later use opens it again."""
        with _changed:
            if self._fd is not None:
                os.close(self._fd)
            self._fd = None
            _open.pop(id(self), None)
            _changed.notify_all()

    def _again(self) -> int:
        fd = with_room(lambda: os.open(self.path, self.flags))
        if _identity(fd) != self._identity:
            os.close(fd)
            raise CheckpointError(
                f"{self.path} was replaced after it was opened, and could not stay open beside so many other files: "
                "read the folder again, or allow more open files (ulimit -n)"
            )
        return fd


def open_file(path: Path) -> int:
    """``open_regular``, which closes other files of ours if too many are open.

    Raises:
        CheckpointError: the file cannot be opened, is a FIFO or the like, or git-lfs has not fetched it.
    """
    try:
        return with_room(lambda: open_regular(path))
    except OSError:
        raise too_many(path) from None


def with_room(act: Callable[[], Result], *, held: int = 0, is_full: IsFull | None = None) -> Result:
    """Call ``act``, which opens a file. If too many are open, close others of ours, or wait until one can be closed.

    Args:
        act: a function that may be called again after it has failed.
        held: how many of our files the caller itself uses.
        is_full: whether an error means that too many files are open; by default this is decided by its errno.
    """
    is_full = is_full or (lambda error: isinstance(error, OSError) and error.errno in FULL)
    while True:
        try:
            return act()
        except Exception as error:
            if not is_full(error):
                raise
            with _changed:
                idle = next((file for file in _open.values() if not file.users), None)
                if idle is not None:
                    idle.close()
                elif sum(file.users for file in _open.values()) > held:
                    _changed.wait()
                else:
                    raise


def _close_idle(newest: int) -> None:
    """Close idle files above our share of the process's limit; all idle files if ``newest`` is near the limit."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    allowed = _MOST if allowed < 0 else allowed
    share = 0 if newest > allowed - allowed // _SHARE else allowed // _SHARE
    for file in [*_open.values()][: max(0, len(_open) - share)]:
        if not file.users:
            file.close()


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino
