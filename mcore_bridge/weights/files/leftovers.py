"""Read the files of a dead writer in a target, without trust in them.

A folder that was copied, unpacked or shared may contain such a home, too. Its names and links must not make a save
write outside of the target.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from mcore_bridge.errors import CheckpointError
from mcore_bridge.weights.files.positional_io import read_bounded
from mcore_bridge.weights.files.strict_json import parse

NEW, OLD = "new", "old"
"""The two sets of files in a home, to one of which its ``live`` leads."""
_NAMES_BYTES = 100_000_000
"""More than the names of a checkpoint take."""


def read_commit(target: Path, live: Path, names_file: Path) -> tuple[str, list[str]]:
    """The set of files to which ``live`` points, and the names of all files that change.

    Raises:
        CheckpointError: these files cannot be from a commit, for example because a name is outside of the target.
            Nothing was changed.
    """
    home = live.parent
    try:
        side = os.readlink(live) if live.is_symlink() else read_bounded(live, len(NEW)).decode()
        if side not in (NEW, OLD):
            raise ValueError(f"{live.name} leads to {side!r}")
        names = parse(read_bounded(names_file, _NAMES_BYTES))
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{names_file.name} is no list of names")
        outside = [name for name in names if not (_is_inside(target, name) and _is_inside(home / side, name))]
        if outside:
            raise ValueError(f"{len(outside)} names lead out of it, such as {outside[0]!r}")
    except (CheckpointError, OSError, ValueError) as error:
        raise CheckpointError(
            f"expected in {home} the files of an interrupted save, found others: {error}; remove that folder"
        ) from None
    return side, names


def _is_inside(folder: Path, name: str) -> bool:
    """Whether ``name`` is a file in ``folder``, with links resolved."""
    path = folder / name
    return (
        "\0" not in name
        and path.name != ".."
        and path.parent.is_relative_to(folder)
        and os.path.realpath(path.parent) == str(path.parent)
    )


def require_own(home: Path) -> None:
    """Remove entries from the home of an interrupted conversion that cannot be from a conversion.

    Through a link or a hard link, writes would change other files. A FIFO would block them.

    Raises:
        CheckpointError: the home itself is a link.
    """
    if home.is_symlink():
        raise CheckpointError(f"{home} is a link, expected a folder of an interrupted conversion: remove the link")
    for path in [*home.rglob("*")]:
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) and not (stat.S_ISREG(status.st_mode) and status.st_nlink <= 1):
            path.unlink()
