"""Paths that callers pass. Unlike in pathlib, an empty path does not mean the working folder."""

import os
from pathlib import Path

from mcore_bridge.errors import BridgeError, CheckpointError, shown


def given_path(path: str | os.PathLike[str], kind: type[BridgeError] = CheckpointError) -> Path:
    """The path of a folder or file from a caller. Every function and command calls this first.

    An unset variable often becomes ``Path("")``, which equals ``Path(".")``. So both are refused, and ``"."`` becomes
    the absolute path of the working folder.

    Args:
        path: the argument of the caller.
        kind: the error to raise.

    Raises:
        BridgeError: it is empty, no path, or holds a null byte.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str):
        raise kind(f"expected a path, found {shown(path)}: pass a string or a pathlib.Path")
    if not text or (not isinstance(path, str) and Path(path) == Path()):
        raise kind(
            "expected a path, found an empty string: is a variable not set? Path('') equals Path('.'), so "
            "pass Path.cwd() for the working folder"
        )
    if "\0" in text:
        raise kind(f"expected a path, found a null byte in {shown(text)}: correct it")
    return Path.cwd() if Path(text) == Path() else Path(text)
