"""Check whether files of a folder can be replaced by renames: folders and mount points cannot."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from mcore_bridge.errors import CheckpointError


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
