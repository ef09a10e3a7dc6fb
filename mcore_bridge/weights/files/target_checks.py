"""Checks a target folder before a save: the home that a dead writer left in it, and whether its files can be replaced.

Somebody may have copied, unpacked or changed such a home. So its names and links must not lead a save to files outside
of the target. Neither folders nor mount points can be replaced by a rename.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from mcore_bridge.errors import CheckpointError
from mcore_bridge.foreign_files import read_bounded, read_json

NEW, OLD = "new", "old"
"""The two sets of files in a home, to one of which its ``live`` leads."""


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
        names = read_json(names_file)
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


def require_replaceable(target: Path, names: Iterable[str]) -> None:
    """Raise if a file of the target cannot be replaced by a rename, before any file is replaced."""
    mounts, device = _mount_points(), target.stat().st_dev
    problems = []
    for name in names:
        path = target / name
        above = [folder for folder in path.parents if folder != target and target in folder.parents]
        if path.is_dir() and not path.is_symlink():
            problems.append(f"{path} is a folder, expected a file")
        elif str(path) in mounts:
            problems.append(f"{path} is a mount point")
        problems += (
            f"{folder} is a link or another file system"
            for folder in above
            if folder.is_symlink() or (folder.exists() and (folder.stat().st_dev != device or str(folder) in mounts))
        )
    if problems:
        raise CheckpointError(f"{'; '.join(dict.fromkeys(problems))}: move it away, or name another folder")


def _mount_points() -> frozenset[str]:
    """The paths of mount points, as far as the system lists them."""
    with suppress(OSError):
        paths = (line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines())
        return frozenset(re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), path) for path in paths)
    return frozenset()
