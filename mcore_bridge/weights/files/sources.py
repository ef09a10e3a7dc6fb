"""Watches the folders that a conversion reads: they must not be its target, and must not change meanwhile.

A conversion opens a folder several times, in several processes. If a trainer saved there in between, old and new
tensors would be mixed without any error. So the state of all files is recorded before the first one is read, and
compared before the result is put in place.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mcore_bridge.arguments import given_path
from mcore_bridge.errors import CheckpointError, plural

_WEIGHTS = ("*.safetensors", "*.distcp", "*.pt", "mp_rank_*/*.pt")
_CONTENT = (*_WEIGHTS, "*.json", ".metadata")
"""Files that influence the result. Other files of the folder, such as logs, may change."""
State = Mapping[str, tuple[int, ...]]
"""Size, times of change and inode of each file by its name in the folder; empty for a link to a missing file."""


@dataclass(frozen=True, slots=True)
class SourceFolders:
    """The folders that a writer reads. Make it before any of them is opened.

    Attributes:
        states: the state of each folder at the beginning.
        kept: the folders that must not be written to.
    """

    states: Mapping[Path, State] = field(default_factory=dict)
    kept: tuple[Path, ...] = ()

    @classmethod
    def of(cls, *folders: str | os.PathLike[str], configs: Iterable[str | os.PathLike[str]] = ()) -> SourceFolders:
        """Take the state of folders.

        Args:
            folders: what is converted, merged or copied.
            configs: folders that are read for their config and tokenizer. If they hold no weights, they may be the
                target, such as verl's folder ``huggingface``.
        """
        read, described = ([*map(given_path, paths)] for paths in (folders, configs))
        kept = [*read, *(folder for folder in described if any(_matching(folder, _WEIGHTS)))]
        return cls({folder: _state_of(folder) for folder in (*read, *described)}, tuple(dict.fromkeys(kept)))

    def as_json(self) -> object:
        """A value that is equal as long as the folders do not change."""
        return [[str(folder.absolute()), sorted(state.items())] for folder, state in self.states.items()]

    def require_apart(self, target: Path) -> None:
        """Raise if ``target`` is one of the folders, by any path, or has files to which their links point.

        A folder inside of a source, or around it, is allowed: no file of the source is replaced there.

        Raises:
            CheckpointError: naming both.
        """
        for folder in self.kept:
            places = {folder, *(Path(os.path.realpath(path)).parent for path in _matching(folder, _CONTENT))}
            if target == Path(os.path.realpath(folder)) or any(_is_same(target, place) for place in places):
                raise CheckpointError(
                    f"{target} is both source and target, since the files of {folder} are there; name another folder "
                    "to write to"
                )

    def require_unchanged(self) -> None:
        """Raise if a file of the folders was added, removed, replaced or rewritten after this object was made.

        Raises:
            CheckpointError: naming the folder and the files.
        """
        for folder, before in self.states.items():
            now = _state_of(folder)
            if changed := sorted(name for name in {*before, *now} if before.get(name) != now.get(name)):
                raise CheckpointError(
                    f"{folder} was changed while it was read, in {plural(len(changed), 'file')} such as {changed[:4]}: "
                    "wait for the process that writes there, and run this again"
                )


def _state_of(folder: Path) -> State:
    return {str(path.relative_to(folder)): _stamp(path) for path in _matching(folder, _CONTENT)}


def _matching(folder: Path, patterns: Iterable[str]) -> Iterator[Path]:
    return (path for pattern in patterns for path in folder.glob(pattern))


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _is_same(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:  # one of them is missing
        return False
