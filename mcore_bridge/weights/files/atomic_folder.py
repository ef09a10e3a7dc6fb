"""Replaces the files of a checkpoint atomically: a reader gets all of the old files, or all of the new ones.

A save writes to a hidden folder in its target, ``.mcore_bridge.TOKEN`` (the *home* of the save). Then it commits in
three steps:

1. Every file that changes becomes a link through ``live`` in the home, which leads to the old files.
2. ``live`` is replaced and leads to the new files. This is one rename, and the commit.
3. Every link is replaced by the file that it leads to, and the home is removed.

A process may die between any two steps, because all links always point to one set of files. Then the next save does the
last step. Files that are neither written nor replaced are never touched, and the folder itself is never moved.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_bridge.arguments import given_path
from mcore_bridge.errors import CheckpointError
from mcore_bridge.weights.files.folder_lock import PREFIX, Writer, locked, require_held
from mcore_bridge.weights.files.sources import SourceFolders
from mcore_bridge.weights.files.target_checks import NEW, OLD, read_commit, require_own, require_replaceable
from mcore_bridge.weights.transfer.failures import raise_on_all

if TYPE_CHECKING:
    from mcore_bridge.weights.transfer.collectives import Group

CONVERSION = "convert"
"""The name of the home of a conversion, instead of a token: its files are kept for its next run."""


@dataclass(frozen=True, slots=True)
class Update:
    """New files for ``target``, which are written to ``new``. Only the rank with a ``writer`` may commit."""

    target: Path
    home: Path
    writer: Writer | None = None

    @property
    def new(self) -> Path:
        """The folder for new files, under the names that they will have in the target."""
        return self.home / NEW

    @property
    def old(self) -> Path:
        """The folder in which replaced files can be read during a commit."""
        return self.home / OLD

    @property
    def live(self) -> Path:
        """The link, which points to ``old`` before the commit and to ``new`` after it."""
        return self.home / "live"

    @property
    def names_file(self) -> Path:
        """The file that lists the names of all files that change."""
        return self.home / "names.json"


def target_of(folder: str | os.PathLike[str]) -> Path:
    """The absolute path of a folder to write to, with links resolved.

    Raises:
        CheckpointError: ``folder`` is an empty string, a file, or no path.
    """
    target = Path(os.path.realpath(given_path(folder)))
    if os.path.exists(target) and not os.path.isdir(target):  # unlike pathlib, these functions raise no PermissionError
        raise CheckpointError(f"expected the path of a folder to save to, found the file {target}: name another")
    return target


@contextmanager
def updating(target: Path, name: str | None = None) -> Iterator[Update]:
    """Hold the lock of ``target``, finish the commits of dead writers, and make a folder for new files.

    The folder for new files is removed when the block ends. With a ``name`` it is kept for the next block with this
    name, if it holds files.

    Raises:
        CheckpointError: another writer holds the lock, or the folder cannot be written to.
    """
    try:
        with locked(target) as writer:
            _recover(target)
            update = Update(target, target / f"{PREFIX}{name or writer.token}", writer)
            require_own(update.home)
            update.new.mkdir(parents=True, exist_ok=True)
            try:
                yield update
            finally:
                if name is None or not any(_files_in(update.new)):
                    shutil.rmtree(update.home, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(f"cannot write to {target}: {error}; it was not changed") from error


@contextmanager
def updating_by_all(world: Group, target: Path) -> Iterator[Update]:
    """``updating`` on all ranks of a job together. Rank 0 is the writer, and only rank 0 may call ``commit``.

    Raises:
        CheckpointError: on every rank, as for ``updating``, or if a rank does not find the files of rank 0.
    """
    failed, update = f"{target} was not changed", Update(target, target)
    with ExitStack() as stack:
        with raise_on_all(world, failed):
            if world.rank == 0:
                update = stack.enter_context(updating(target))
        update = replace(update, home=target / world.all_gather_object(update.home.name)[0])
        with raise_on_all(world, failed):
            if not update.new.is_dir():
                raise CheckpointError(
                    f"expected the folder {update.home} that rank 0 has made: name a folder on a file system that all "
                    "ranks share, the same on each"
                )
        yield update


def commit(update: Update, sources: SourceFolders, replaced: Iterable[str] = (), first: Iterable[str] = ()) -> None:
    """Put all new files into the target at once. They replace files with their names, and the files in ``replaced``.

    On a file system without symbolic links, files change one after the other. Files in ``first`` are removed before all
    others and written last, so that no reader can mistake half a checkpoint for a whole one.

    Args:
        sources: the folders from which the new files were made.
        replaced: names of files in the target that belong to the old checkpoint.
        first: names of files without which no reader recognises a checkpoint.

    Raises:
        CheckpointError: a file cannot be replaced, a source was changed during the save, or the lock was lost. Then
            nothing has changed.
    """
    sources.require_unchanged()
    new = sorted(_files_in(update.new))
    names = sorted({*new, *(name for name in replaced if _is_there(update.target / name))})
    require_replaceable(update.target, names)
    if any(_is_there(update.target / name) for name in names):
        _flush(update.new)
    require_held(update.target, update.writer)
    update.names_file.write_text(json.dumps(names))
    try:
        _point(update, OLD)
    except OSError:
        _put_one_by_one(update, new, names, first)
    else:
        try:
            for name in names:
                _keep(update.target / name, update.old / name)
            for name in names:
                _link(update, name)
            require_held(update.target, update.writer)
            _point(update, NEW)
        finally:
            _settle(update)
    shutil.rmtree(update.home, ignore_errors=True)


def _point(update: Update, side: str) -> None:
    """Make ``live`` point to ``side``, in one step."""
    link = update.home / "next"
    link.symlink_to(side)
    link.replace(update.live)


def _keep(path: Path, kept: Path) -> None:
    """Give a file a second name."""
    if not _is_there(path):
        return
    kept.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        kept.symlink_to(os.path.realpath(path))
        return
    try:
        os.link(path, kept)
    except OSError:  # a file system without hard links
        shutil.copy2(path, kept)


def _link(update: Update, name: str) -> None:
    """Replace a file by a link through ``live``, in one step."""
    path, link = update.target / name, update.home / "link"
    path.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(os.path.relpath(update.live / name, path.parent))
    link.replace(path)


def _put_one_by_one(update: Update, new: Iterable[str], names: Iterable[str], first: Iterable[str]) -> None:
    """Commit on a file system without symbolic links; see ``commit``."""
    heads, written = {*first}, {*new}
    update.live.write_text(NEW)
    for name in sorted(names, key=lambda name: name not in heads):
        if name in heads or name not in written:
            (update.target / name).unlink(missing_ok=True)
    _settle(update, last=heads)


def _settle(update: Update, last: Iterable[str] = ()) -> None:
    """Move the files to which ``live`` points into the target, and remove our links that point to nothing."""
    live, heads = update.live, {*last}
    name_of_side, names = read_commit(update.target, live, update.names_file)
    side = update.home / name_of_side
    for name in sorted(names, key=lambda name: name in heads):
        path = update.target / name
        if _is_there(side / name):
            path.parent.mkdir(parents=True, exist_ok=True)
            _replace(path, side / name, update.home / "link")
        elif path.is_symlink() and Path(os.path.normpath(path.parent / os.readlink(path))) == live / name:
            path.unlink()
            _remove_empty(path.parent, update.target)
    live.unlink()


def _replace(path: Path, file: Path, link: Path) -> None:
    """Replace a link by its file. The file also keeps its first name, for readers that just follow the link."""
    try:
        os.link(file, link, follow_symlinks=False)
    except OSError:  # a file system without hard links
        file.replace(path)
    else:
        link.replace(path)


def _remove_empty(folder: Path, top: Path) -> None:
    while folder != top:
        try:
            folder.rmdir()
        except OSError:
            return
        folder = folder.parent


def _recover(target: Path) -> None:
    """Finish the commits of dead writers, and remove their files. We hold the lock, so no other writer is alive."""
    for home in target.glob(f"{PREFIX}*"):
        update = Update(target, home)
        if home.is_symlink() or not home.is_dir():
            if home.suffix in (".stale", ".probe", ".named"):
                home.unlink(missing_ok=True)
        elif _is_there(update.live):
            _settle(update)
            shutil.rmtree(home, ignore_errors=True)
        elif home.name != f"{PREFIX}{CONVERSION}":
            shutil.rmtree(home, ignore_errors=True)


def _files_in(folder: Path) -> Iterator[str]:
    return (str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def _is_there(path: Path) -> bool:
    return os.path.lexists(path)


def _flush(folder: Path) -> None:
    """Wait until the files of a folder are on disk. A network file system may guarantee less."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def require_files(folder: Path, names: Iterable[str]) -> None:
    """Check that this rank finds the files of all ranks in ``folder``.

    Raises:
        CheckpointError: files are missing, for example because this path is another folder on each rank.
    """
    if absent := [name for name in names if not (folder / name).is_file()]:
        raise CheckpointError(
            f"{len(absent)} files that other ranks wrote are not in {folder}, such as {absent[0]}: name a folder on a "
            "file system that all ranks share, the same on each"
        )
