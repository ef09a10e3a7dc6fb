"""A folder of safetensors as a lazy mapping: a tensor is a view of the mapped file until somebody copies from it.

Files are opened and mapped once; the pages of a tensor are given back when its reader moves on, so that reading a
checkpoint of any size keeps one tensor resident. A load reads the files by position instead (``file_of``). The page
cache is shared by all processes of a node.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from mcore_bridge.errors import CheckpointError
from mcore_bridge.weights.safetensors_file import SafetensorsFile

if TYPE_CHECKING:
    from mcore_bridge.weights.manifest import TensorSpec

SINGLE = "model.safetensors"
INDEX = f"{SINGLE}.index.json"
HEADS = ("config.json", INDEX, SINGLE)
"""Without these nobody takes a folder for a checkpoint."""
_SHARDS = "model-[0-9]*-of-[0-9]*.safetensors"


class Checkpoint(Mapping[str, Tensor]):
    """All tensors of a HF folder, with an index or without."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise CheckpointError(f"no folder {self.folder}: expected one with *.safetensors files")
        before = _identity(self.folder)
        self._index = _read_index(self.folder)
        self._files = {name: SafetensorsFile(self.folder / name) for name in self._file_names()}
        if _identity(self.folder) != before:
            raise CheckpointError(f"{self.folder} was changed while it was opened, as by a save: open it again")
        self._where = self._locate()
        self._check_index()

    def _file_names(self) -> list[str]:
        if self._index is not None:
            names = sorted(set(self._index.values()))
            missing = [name for name in names if not (self.folder / name).is_file()]
            if missing:
                raise CheckpointError(f"{self.folder / INDEX} names files that are missing: {missing}; copy them again")
            return names
        if (self.folder / SINGLE).is_file():
            return [SINGLE]
        names = sorted(path.name for path in self.folder.glob("*.safetensors"))
        if not names:
            raise CheckpointError(f"no *.safetensors in {self.folder}; other formats are not read: convert it first")
        return names

    def _locate(self) -> dict[str, SafetensorsFile]:
        """The file of each tensor: the one that the index names, and the only one where it names none."""
        listed, found = self._index or {}, dict[str, SafetensorsFile]()
        for file_name, file in self._files.items():
            for name in file.entries:
                if listed.get(name, file_name) == file_name and (other := found.setdefault(name, file)) is not file:
                    raise CheckpointError(
                        f"{name} is in {other.path} and in {file_name}, and no {INDEX} says in which; remove the files "
                        "that are left of another save"
                    )
        return found

    def _check_index(self) -> None:
        wrong = [name for name, file in (self._index or {}).items() if name not in self._files[file].entries]
        if wrong:
            raise CheckpointError(
                f"{self.folder / INDEX} promises {len(wrong)} tensors that its files lack: {wrong[:5]}"
            )

    def __getitem__(self, name: str) -> Tensor:
        return self._where[name].tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)

    def file_of(self, name: str) -> SafetensorsFile:
        """The file that holds the tensor ``name``."""
        return self._where[name]

    def release(self, name: str) -> None:
        """Give back the memory of pages that were read for ``name``; they stay in the page cache."""
        self._where[name].release(name)

    def pairs(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """``(name, tensor)`` for each of ``names``; a tensor's memory is given back when the next is asked for."""
        for name in names:
            yield name, self[name]
            self.release(name)


def names_in(folder: str | os.PathLike[str]) -> tuple[str, ...]:
    """The names of all tensors of a HF folder, as its index has them if there is one; none where it has no weights."""
    index = _read_index(Path(folder))
    if index is not None or not any(Path(folder).glob("*.safetensors")):
        return tuple(index or ())
    return tuple(Checkpoint(folder))


def weight_files(folder: Path) -> list[str]:
    """The names of the files that hold the weights of a checkpoint, and its index; not all of them need be there.

    Other ``*.safetensors``, such as those of an adapter, are not of the checkpoint: its index does not name them.
    """
    try:
        listed = {Path(name).name for name in (_read_index(folder) or {}).values()}
    except CheckpointError:  # a damaged one
        listed = set()
    return sorted({SINGLE, INDEX, *listed, *(path.name for path in folder.glob(_SHARDS))})


def write_index(folder: Path, files: Mapping[str, Iterable[TensorSpec]]) -> None:
    """Write the index of a folder, as transformers does: which of its ``files`` holds which tensors."""
    held = [(spec, name) for name, specs in files.items() for spec in specs]
    index = {
        "metadata": {"total_size": sum(spec.num_bytes for spec, _ in held)},
        "weight_map": {spec.name: name for spec, name in held},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _identity(folder: Path) -> list[tuple[int, int] | None]:
    """Which files the index and a single file of weights are: all files of a folder change together with these."""
    found: list[tuple[int, int] | None] = []
    for name in (INDEX, SINGLE):
        try:
            status = (folder / name).stat()
            found.append((status.st_dev, status.st_ino))
        except OSError:
            found.append(None)
    return found


def _read_index(folder: Path) -> dict[str, str] | None:
    """Which file each tensor is in; None without an index, or beside a single file, which transformers prefers too."""
    path = folder / INDEX
    if not path.is_file() or (folder / SINGLE).is_file():
        return None
    try:
        return dict(json.loads(path.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: expected JSON with a weight_map, found {error!r}") from None
