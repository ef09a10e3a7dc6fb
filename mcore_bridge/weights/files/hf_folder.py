"""A folder of safetensors as a lazy mapping: each tensor is a view of a mapped file.

Files are mapped once. The pages of a tensor are freed when its reader takes the next tensor. So only one tensor of a
checkpoint is in memory at a time. A load does not use the maps; it reads files by position. All processes of a node
share the page cache.
"""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from torch import Tensor

from mcore_bridge.arguments import given_path
from mcore_bridge.config.mesh.alike import Content, digest_of
from mcore_bridge.errors import CheckpointError, plural
from mcore_bridge.foreign_files import read_json
from mcore_bridge.rules.scheme import plain_names
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.files.open_files import open_file
from mcore_bridge.weights.files.safetensors import DTYPES, SafetensorsFile

SINGLE = "model.safetensors"
INDEX = f"{SINGLE}.index.json"
HEADS = ("config.json", INDEX, SINGLE)
"""Files that every reader requires in a checkpoint."""
_READ_WHOLE, _SAMPLES, _SAMPLE = 64 << 20, 16, 1 << 12
_ATTEMPTS = 5
_SHARDS = "model-[0-9]*-of-[0-9]*.safetensors"
_SUFFIX = ".safetensors"
_OF_MEGATRON = ("metadata.json", ".metadata", "latest_checkpointed_iteration.txt", "dist_ckpt", "model_optim_rng.pt")
_OTHERS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".msgpack", ".h5", ".npz")
"""Limit on the size of an index, the same as the format's limit on headers: both list tensors."""


def content_of(folder: str | os.PathLike[str]) -> Content:
    """A value that ranks can compare for a folder, from its files of tensors. Each rank may read another copy.

    Files of up to 64 MB are read whole. Of larger files a few KB are read.
    """
    texts: list[str | bytes] = []
    for path in sorted(Path(folder).glob(f"*{_SUFFIX}")):
        with os.fdopen(open_file(path), "rb") as file:
            size = file.seek(0, os.SEEK_END)
            texts += [path.name, str(size)]
            step = size // _SAMPLES if size > _READ_WHOLE else max(size, 1)
            for start in range(0, size, step):
                file.seek(start)
                texts.append(file.read(min(step, _READ_WHOLE if size <= _READ_WHOLE else _SAMPLE)))
    return Content(os.fspath(folder), digest_of(*texts))


class Checkpoint(Mapping[str, Tensor]):
    """All tensors of an HF folder by name, with an index or without, as its files store them.

    Attributes:
        files: the file of each tensor.

    Raises:
        CheckpointError: the folder is missing, or one of its files is missing, damaged or contradicts the index.

    Example:
        >>> Checkpoint("Qwen3-8B")["model.norm.weight"].shape  # doctest: +SKIP
        torch.Size([4096])
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = given_path(folder)
        if not os.path.isdir(self.folder):  # Path.is_dir raises if a parent folder may not be entered
            raise CheckpointError(
                f"no folder {self.folder}: expected a folder with *.safetensors files, such as `hf download NAME` "
                "prints"
            )
        failed = None
        for _ in range(_ATTEMPTS):
            before = _identity(self.folder)
            try:
                self._open()
            except CheckpointError:
                if _identity(self.folder) == before:
                    # one failure may be chance: a save moved a file while we followed a link to it
                    if failed == before:
                        raise
                    failed = before
            else:
                if _identity(self.folder) == before:
                    return
        raise CheckpointError(
            f"{self.folder} was changed {_ATTEMPTS} times while it was opened: wait for the process that saves there"
        )

    def _open(self) -> None:
        self._index = _read_index(self.folder)
        self._files = {name: SafetensorsFile(self.folder / name) for name in self._file_names()}
        self.files = self._locate()
        self._check_index()

    def _file_names(self) -> list[str]:
        if self._index is not None:
            names = sorted(set(self._index.values()))
            missing = [name for name in names if not os.path.lexists(self.folder / name)]
            if missing:
                raise CheckpointError(f"{self.folder / INDEX} names files that are missing: {missing}; copy them again")
            return names
        if _is_there(self.folder / SINGLE):
            return [SINGLE]
        names = [name for name in shard_names(self.folder) if not _leads_nowhere(self.folder / name)]
        if not names:
            raise CheckpointError(
                f"expected *.safetensors files in {self.folder}, found none: {_advice(self.folder)}",
                in_python="load_checkpoint reads a checkpoint of megatron-core; load_weights=False builds a model "
                "without weights",
            )
        return names

    def _locate(self) -> dict[str, SafetensorsFile]:
        """The file of each tensor. As in transformers 5, the index may omit tensors. No tensor may be in two files."""
        file_of: dict[str, SafetensorsFile] = {}
        twice = [
            f"{name} is in {other.path} and in {file_name}"
            for file_name, file in self._files.items()
            for name in file.entries
            if (other := file_of.setdefault(name, file)) is not file
        ]
        if twice:
            raise CheckpointError(
                f"expected each tensor in one file, found {len(twice)} in two: {'; '.join(twice[:5])}; remove the "
                "files of another save"
            )
        return file_of

    def _check_index(self) -> None:
        wrong = [name for name, file in (self._index or {}).items() if name not in self._files[file].entries]
        if wrong:
            raise CheckpointError(
                f"{self.folder / INDEX} lists {plural(len(wrong), 'tensor')} that the files named there lack: "
                f"{wrong[:5]}; download or copy the folder again"
            )

    def __getitem__(self, name: str) -> Tensor:
        return self.files[name].tensor(name)

    def __contains__(self, name: object) -> bool:
        return name in self.files

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)

    def spec(self, name: str) -> TensorSpec | None:
        """Name, shape and dtype of a tensor from the header of its file; None if torch lacks the dtype."""
        entry = self.files[name].entries[name]
        dtype = DTYPES.get(entry.dtype)
        return TensorSpec(name, entry.shape, dtype) if dtype is not None else None

    def require_unchanged(self) -> None:
        """Raise ``CheckpointError`` if an opened file was written to. A new file at its path does not count."""
        for file in self._files.values():
            file.require_unchanged()


def names_in(folder: str | os.PathLike[str]) -> tuple[str, ...]:
    """The plain names of all tensors of an HF folder, by its index if there is one; empty if it has no weights."""
    names: Iterable[str] = _read_index(Path(folder)) or ()
    return tuple(plain_names(names or (Checkpoint(folder) if shard_names(Path(folder)) else ())))


def weight_files(folder: Path) -> list[str]:
    """The names of the files of a checkpoint's weights, its index included. Some of them may be missing.

    Other ``*.safetensors``, such as files of an adapter, do not belong to the checkpoint: its index does not name them.
    """
    try:
        listed = {Path(name).name for name in (_read_index(folder) or {}).values()}
    except CheckpointError:  # a damaged index
        listed = set()
    return sorted({SINGLE, INDEX, *listed, *(path.name for path in folder.glob(_SHARDS))})


def foreign_weights(folder: Path) -> list[str]:
    """The names of all files in a folder that hold weights of any format, or belong to weights."""
    names = os.listdir(folder) if folder.is_dir() else []
    return sorted(name for name in names if name in (INDEX, *_OF_MEGATRON) or name.endswith((_SUFFIX, *_OTHERS)))


def shard_names(folder: Path) -> list[str]:
    """The names ``*.safetensors`` in a folder, of files and others; empty if there is no folder.

    Raises:
        CheckpointError: the folder may not be read.
    """
    try:
        return sorted(name for name in os.listdir(folder) if name.endswith(_SUFFIX))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"cannot list {folder}: {error.strerror}; make it a folder that you may read") from None


def _advice(folder: Path) -> str:
    """Advice for a folder without HF weights, by the other files in it."""
    names = sorted(os.listdir(folder))
    if any(name in _OF_MEGATRON for name in names):
        return "it is a checkpoint of megatron-core: make an HF folder by mcore-bridge convert"
    if others := [name for name in names if name.endswith(_OTHERS)]:
        return f"other formats are not read, such as {others[0]}: save the model again with save_pretrained"
    return "download them too, or let mcore-bridge draw write random ones"


def write_index(folder: Path, files: Mapping[str, Iterable[TensorSpec]]) -> None:
    """Write the index of a folder, in the format of transformers.

    Args:
        files: the tensors of each file.
    """
    held = [(spec, name) for name, specs in files.items() for spec in specs]
    index = {
        "metadata": {"total_size": sum(spec.num_bytes for spec, _ in held)},
        "weight_map": {spec.name: name for spec, name in held},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _identity(folder: Path) -> list[tuple[int, int, int] | None]:
    """Device, inode and time of the index and of a single file of weights. Every save replaces one of these files.

    The time is needed because a second save may reuse the inode of the first one.
    """
    identity: list[tuple[int, int, int] | None] = []
    for name in (INDEX, SINGLE):
        try:
            status = (folder / name).stat()
            identity.append((status.st_dev, status.st_ino, status.st_mtime_ns))
        except OSError:
            identity.append(None)
    return identity


def _read_index(folder: Path) -> dict[str, str] | None:
    """The file of each tensor. None without an index, or if there is a single file, which transformers prefers."""
    path = folder / INDEX
    if not _is_there(path) or _is_there(folder / SINGLE):
        return None
    listed = read_json(path)
    if not isinstance(listed, dict) or not isinstance(listed.get("weight_map"), dict):
        raise CheckpointError(
            f"{path} is damaged: expected an object with an object weight_map, found none; copy it again"
        )
    files: dict[str, str] = listed["weight_map"]
    wrong = {name: file for name, file in files.items() if not _is_file_name(file)}
    if wrong:
        some = ", ".join(f"{name!r}: {reprlib.repr(file)}" for name, file in list(wrong.items())[:5])
        raise CheckpointError(
            f"{path} is damaged: expected a *.safetensors file in the same folder for each tensor, found "
            f"{len(wrong)} other values ({some}). Put all files into one folder and save the index again"
        )
    return files


def _is_there(path: Path) -> bool:
    return os.path.lexists(path) and not _leads_nowhere(path)


def _leads_nowhere(path: Path) -> bool:
    """Whether ``path`` is a link to a missing file. A save that dies leaves such links for files of the other set."""
    return os.path.islink(path) and not os.path.exists(path)


def _is_file_name(value: object) -> bool:
    return isinstance(value, str) and value.endswith(_SUFFIX) and os.path.basename(value) == value
