"""Files that are read or written at offsets, of which more may be in use than a process may have open.

A checkpoint may have thousands of files, and ``ulimit -n`` may be 256. So a file is opened when it is needed, and is
closed when others need the room: first that which was not used for longest. Threads may use files at the same time.
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
from mcore_bridge.foreign_files import FULL

Result = TypeVar("Result")
IsFull = Callable[[Exception], bool]
_SHARE = 4
"""Of the files that a process may have open, ours are at most one in so many: libraries need the rest."""
_MOST = 1 << 16
_changed = threading.Condition(threading.RLock())
_open: OrderedDict[int, OpenFile] = OrderedDict()
"""Files that are open, by number of the object. The one that was used last is the last."""


class OpenFile:
    """A file that is open now, and may be closed and opened again.

    Args:
        path: of the file.
        flags: with which it is opened again.
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
            CheckpointError: the file was closed for want of room, and another one is at its path now.
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


def with_room(act: Callable[[], Result], *, held: int = 0, is_full: IsFull | None = None) -> Result:
    """Call ``act``, which opens a file. If too many are open, close others of ours, or wait until one can be closed.

    Args:
        act: what may be called again after it has failed.
        held: how many files of ours the caller uses itself.
        is_full: whether an error means that too many files are open; by default an ``OSError`` with such a number.
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
    """Close files until no more are open than our share; all, if the process has so many that ``newest`` is high."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    allowed = _MOST if allowed < 0 else allowed
    share = 0 if newest > allowed - allowed // _SHARE else allowed // _SHARE
    for file in [*_open.values()][: max(0, len(_open) - share)]:
        if not file.users:
            file.close()


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino
