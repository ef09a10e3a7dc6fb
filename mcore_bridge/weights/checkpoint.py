"""A folder of safetensors as a lazy mapping: a tensor is a view of the mapped file until somebody copies from it.

Files are opened and mapped once; the pages of a tensor are given back when its reader moves on, so that reading a
checkpoint of any size keeps one tensor resident. The page cache is shared by all processes of a node.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_bridge.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = f"{SINGLE}.index.json"

# https://github.com/huggingface/safetensors#format
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class _Entry:
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsFile:
    """One mapped file. The whole header is checked on opening; data is touched when tensors are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot open {path}: {error}") from None
        self.entries = self._read_header()

    def _read_header(self) -> dict[str, _Entry]:
        size = len(self._map)
        length = struct.unpack("<Q", self._map[:8])[0] if size >= 8 else size
        if 8 + length > size:
            raise CheckpointError(f"{self.path} has {size} bytes, less than its header; it is truncated: copy it again")
        try:
            header = json.loads(self._map[8 : 8 + length])
            entries = {name: _entry(value, 8 + length) for name, value in header.items() if name != "__metadata__"}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{self.path} is no safetensors file, or its header is damaged: {error!r}") from None
        end = max((entry.stop for entry in entries.values()), default=8 + length)
        if end > size:
            raise CheckpointError(
                f"{self.path} has {size} bytes but its header promises {end}; it is truncated: copy it again"
            )
        return entries

    def tensor(self, name: str) -> Tensor:
        """The tensor as a view of the file."""
        entry = self.entries[name]
        if entry.start == entry.stop:
            return torch.empty(entry.shape, dtype=entry.dtype)
        count = math.prod(entry.shape)
        return torch.frombuffer(self._map, dtype=entry.dtype, count=count, offset=entry.start).view(entry.shape)

    def release(self, name: str) -> None:
        """Give back the memory of pages that were read for ``name``; they stay in the page cache."""
        entry = self.entries[name]
        start = entry.start // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, start, entry.stop - start)


def _entry(value: dict[str, Any], base: int) -> _Entry:
    start, stop = value["data_offsets"]
    shape = tuple(value["shape"])
    dtype = DTYPES[value["dtype"]]
    if stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"shape {shape} of {value['dtype']} does not take {stop - start} bytes")
    return _Entry(dtype, shape, base + start, base + stop)


class Checkpoint(Mapping[str, Tensor]):
    """All tensors of a HF folder, with an index or without."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise CheckpointError(f"no folder {self.folder}: expected one with *.safetensors files")
        self._index = _read_index(self.folder)
        self._files = {name: SafetensorsFile(self.folder / name) for name in self._file_names()}
        self._where = {name: file for file in self._files.values() for name in file.entries}
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

    def pairs(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """``(name, tensor)`` for each of ``names``; a tensor's memory is given back when the next is asked for."""
        for name in names:
            yield name, self[name]
            self._where[name].release(name)


def names_in(folder: str | os.PathLike[str]) -> tuple[str, ...]:
    """The names of all tensors of a HF folder, as its index has them if there is one; none where it has no weights."""
    index = _read_index(Path(folder))
    if index is not None or not any(Path(folder).glob("*.safetensors")):
        return tuple(index or ())
    return tuple(Checkpoint(folder))


def _read_index(folder: Path) -> dict[str, str] | None:
    """Which file each tensor is in; None without an index, or beside a single file, which transformers prefers too."""
    path = folder / INDEX
    if not path.is_file() or (folder / SINGLE).is_file():
        return None
    try:
        return dict(json.loads(path.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: expected JSON with a weight_map, found {error!r}") from None
