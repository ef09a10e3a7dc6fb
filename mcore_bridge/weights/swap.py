"""A folder changes in one step: everything is in a folder beside it, which then takes its place.

Whichever process dies, whenever, the target is the old folder or the new one.
"""

from __future__ import annotations

import ctypes
import glob
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_bridge.errors import CheckpointError, by_ranks, told

if TYPE_CHECKING:
    from mcore_bridge.weights.transport import Group


def beside(target: Path, name: str) -> Path:
    """Where what is to become ``target`` is written first; ``name`` tells one writer from another.

    Raises:
        CheckpointError: ``target`` is where a file system is mounted, and no other folder can take its place.
    """
    if os.path.ismount(target):
        raise CheckpointError(f"{target} is a mount point, which cannot be replaced in one step: name a folder in it")
    return target.parent / f".{target.name}.{name}.partial"


@contextmanager
def on_all(world: Group, what: str) -> Iterator[None]:
    """What fails in here on any rank raises ``what`` on all of them, when all have come to the end."""
    error = ""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as problem:  # torch's CheckpointException is no Exception; the others must hear of it, too
        error = told(problem)
    if failures := by_ranks(world.exchange(error)):
        raise CheckpointError(f"{what}: {failures}")


@contextmanager
def all_or_none(world: Group, target: Path, staging: Path) -> Iterator[None]:
    """The same for what is written to ``staging``, which is removed then."""
    try:
        with on_all(world, f"{target} was not written, and is as it was"):
            yield
    except CheckpointError:
        if world.rank == 0:
            shutil.rmtree(staging, ignore_errors=True)
        raise


def require_files(folder: Path, names: Iterable[str]) -> None:
    """Raise where files that all ranks wrote are not in ``folder`` for this one.

    Raises:
        CheckpointError: as where ranks have folders of their own by the same name.
    """
    if absent := [name for name in names if not (folder / name).is_file()]:
        raise CheckpointError(
            f"{len(absent)} files that other ranks wrote are not in {folder}, such as {absent[0]}: name a folder on a "
            "file system that all ranks share, the same on each"
        )


def clear_stale(target: Path, staging: Path) -> None:
    """Remove what saves that died left behind."""
    writer = "[0-9a-f]" * 8  # and not the rest of another target's name
    for path in target.parent.glob(beside(Path(glob.escape(target.name)), writer).name):
        if path != staging:
            shutil.rmtree(path, ignore_errors=True)


def replace(target: Path, staging: Path, dropped: Iterable[str]) -> None:
    """Put ``staging`` in the place of ``target``, which keeps files that are not written anew, but for ``dropped``.

    What was there is removed, so what takes its place is on disk first.
    Where the file system cannot exchange two folders, two renames do it, and a crash just between them leaves the old
    folder as ``.NAME.old``.

    Args:
        dropped: ``fnmatch`` patterns of names.
    """
    if not target.exists():
        staging.rename(target)
        return
    _flush(staging)
    for path in target.iterdir():
        new = staging / path.name
        if not new.exists() and not any(fnmatchcase(path.name, pattern) for pattern in dropped):
            shutil.copytree(path, new, copy_function=_link, symlinks=True) if path.is_dir() else _link(path, new)
    if _exchange(staging, target):
        shutil.rmtree(staging, ignore_errors=True)  # the new one is in place, whatever becomes of the old
        return
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    target.rename(old)
    staging.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _flush(folder: Path) -> None:
    """Wait until the files of a folder are on disk; of another machine's, as far as the file system has them."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _link(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two paths in one step, where the system can: Linux, renameat2 with RENAME_EXCHANGE (2)."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    at_cwd = -100
    return call(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), 2) == 0
