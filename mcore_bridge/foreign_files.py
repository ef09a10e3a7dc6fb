"""Reads small files that other programs wrote: each is read whole, up to a maximal size. Ambiguous JSON raises."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mcore_bridge.errors import BridgeError, CheckpointError

Hook = Callable[[dict[str, Any]], object]
FULL = (errno.EMFILE, errno.ENFILE)
"""The ``errno`` values that mean that too many files are open."""
READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a path may have become a FIFO, which would block
MOST_BYTES = 100_000_000
"""More than any config or index has."""
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFDIR: "a folder",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_POINTER = b"version https://git-lfs"


def read_json(
    path: Path,
    kind: type[BridgeError] = CheckpointError,
    *,
    most: int = MOST_BYTES,
    finite: bool = True,
    hook: Hook | None = None,
) -> Any:
    """The value of a JSON file. Every file of JSON that is read is read here.

    Args:
        kind: the error to raise.
        most: bytes that the file may have.
        finite, hook: as for ``parse``.

    Raises:
        BridgeError: of ``kind``: it is no file that can be read, is too large, or holds something else.
    """
    data = read_bounded(path, most, kind)
    try:
        return parse(data, finite=finite, hook=hook)
    except ValueError as error:
        raise kind(f"{path} must be valid JSON, but is not: {error}; copy it again") from None


def parse(data: bytes, *, finite: bool = True, hook: Hook | None = None) -> Any:
    """Parse JSON in UTF-8. An object must have each key once, since readers differ in the value that they take for a
    repeated key.

    Args:
        finite: refuse NaN and infinity, which JSON does not have, and transformers 4 writes into configs.
        hook: takes each object, and returns what is read in its place.

    Raises:
        ValueError: ``data`` is something else, or is nested too deep.
    """

    def made(pairs: list[tuple[str, Any]]) -> object:
        parsed = dict(pairs)
        if len(parsed) < len(pairs):
            twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
            raise ValueError(f"expected each key once, found {len(twice)} twice: {twice[:5]}")
        return parsed if hook is None else hook(parsed)

    try:
        return json.loads(data.decode(), object_pairs_hook=made, parse_constant=_refuse if finite else None)
    except UnicodeDecodeError as error:  # its message would show all of the data
        raise ValueError(f"byte {error.start} is not of UTF-8") from None
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def read_bounded(path: Path, num_bytes: int, kind: type[BridgeError] = CheckpointError) -> bytes:
    """All of a small file; see ``open_regular``.

    Raises:
        BridgeError: of ``kind``: it cannot be opened, or has more than ``num_bytes``.
    """
    try:
        fd = open_regular(path, kind)
    except OSError:
        raise too_many(path, kind) from None
    try:
        with open(fd, "rb") as file:
            is_larger = os.fstat(fd).st_size > num_bytes  # a hole of terabytes is not read to learn that
            data = b"" if is_larger else file.read(num_bytes + 1)
    except OSError as error:
        raise kind(f"cannot read {path}: {error.strerror}; copy it again") from None
    if is_larger or len(data) > num_bytes:
        raise kind(f"{path} must have at most {num_bytes} bytes, found more: copy it again")
    return data


def open_regular(path: Path, kind: type[BridgeError] = CheckpointError) -> int:
    """Open a file for reading and return its descriptor. Links are followed: the hub's cache consists of links.

    Raises:
        BridgeError: of ``kind``: the file cannot be opened, is a FIFO or the like, or git-lfs has not fetched it.
        OSError: this process has too many files open.
    """
    try:
        other = _KINDS.get(stat.S_IFMT(os.stat(path).st_mode))
        if other is not None:
            raise kind(f"{path} is {other}, expected a file: replace it by the file, or remove it")
        fd = os.open(path, READ)
    except OSError as error:
        if error.errno in FULL:
            raise
        raise kind(f"cannot open {path}: {error.strerror}; make it a file that you may read") from None
    problem = ""
    try:
        if os.pread(fd, len(_POINTER), 0) == _POINTER:
            problem = f"{path} is a pointer of git-lfs, expected the file itself: run `git lfs pull` in its folder"
    except OSError as error:
        problem = f"cannot read {path}: {error.strerror}; copy it again"
    if problem:
        os.close(fd)
        raise kind(problem)
    return fd


def too_many(path: Path, kind: type[BridgeError] = CheckpointError) -> BridgeError:
    """The error for a file that cannot be opened beside all others."""
    return kind(f"cannot open {path}: this process has too many other files open; allow more of them (ulimit -n)")


def _refuse(name: str) -> object:
    raise ValueError(f"{name} is no number of JSON")
