"""One file of the safetensors format, read and written in place: a tensor is a range of bytes behind a JSON header.

https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mcore_bridge.errors import CheckpointError
from mcore_bridge.weights.disk import Array, array_of, read_array, write_bytes

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
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class _Entry(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsFile:
    """A file to read. It is opened once and the whole header is checked; data is touched when tensors are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._fd)
            self._map = mmap.mmap(self._fd, 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot open {path}: {error}") from None
        self._address = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()
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
        """The tensor as a view of the mapped file."""
        entry = self.entries[name]
        if entry.start == entry.stop:
            return torch.empty(entry.shape, dtype=entry.dtype)
        count = math.prod(entry.shape)
        return torch.frombuffer(self._map, dtype=entry.dtype, count=count, offset=entry.start).view(entry.shape)

    def read(self, views: Sequence[Tensor], out: Array) -> None:
        """Copy ``views``, slices of its tensors of one dtype, one behind the other into ``out`` (of ``array_of``).

        Not through the map; and what lies side by side in the file at once.

        Raises:
            CheckpointError: the file cannot be read, or has become shorter since it was opened.
        """
        left = out.reshape(-1)
        try:
            for address, shape, strides in _stretches(views):
                size = math.prod(shape)
                read_array(self._fd, address - self._address, left[:size].reshape(shape), strides)
                left = left[size:]
        except (OSError, EOFError) as error:
            raise CheckpointError(f"cannot read {self.path}: {error}; copy it again") from None

    def release(self, name: str) -> None:
        """Give back the memory of pages that were read for ``name``; they stay in the page cache."""
        entry = self.entries[name]
        start = entry.start // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, start, entry.stop - start)


def _stretches(views: Iterable[Tensor]) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Address, shape and strides in bytes of each view; of dense ones that lie side by side, of all as one."""
    start, num_bytes, itemsize = 0, 0, 1
    for view in views:
        address = view.data_ptr()
        if view.is_contiguous() and address == start + num_bytes:
            num_bytes += view.nbytes
            continue
        if num_bytes:
            yield start, (num_bytes // itemsize,), (itemsize,)
        start, num_bytes, itemsize = address, view.nbytes, view.itemsize
        if not view.is_contiguous():
            yield start, tuple(view.shape), tuple(stride * itemsize for stride in view.stride())
            num_bytes = 0
    if num_bytes:
        yield start, (num_bytes // itemsize,), (itemsize,)


def _entry(value: dict[str, Any], base: int) -> _Entry:
    start, stop = value["data_offsets"]
    shape = tuple(value["shape"])
    dtype = DTYPES[value["dtype"]]
    if stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"shape {shape} of {value['dtype']} does not take {stop - start} bytes")
    return _Entry(dtype, shape, base + start, base + stop)


class SafetensorsWriter:
    """A new file. Its header is written at once; each tensor then as its bytes come, in any order, by any thread."""

    def __init__(self, path: Path, tensors: Iterable[tuple[str, tuple[int, ...], torch.dtype]]) -> None:
        header, self._starts = _lay_out(tensors)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            write_bytes(self._fd, 0, array_of(torch.frombuffer(bytearray(header), dtype=torch.uint8)))
        except OSError:
            os.close(self._fd)
            raise

    def write(self, name: str, start: int, data: Tensor) -> None:
        """Write ``data`` (contiguous, on CPU) from byte ``start`` of the tensor ``name`` on."""
        write_bytes(self._fd, self._starts[name] + start, array_of(data))

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._fd)


def _lay_out(tensors: Iterable[tuple[str, tuple[int, ...], torch.dtype]]) -> tuple[bytes, dict[str, int]]:
    """The header, and where each tensor begins. Wide dtypes come first, so that each is aligned to its own."""
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets, stop = {}, 0
    for name, shape, dtype in sorted(tensors, key=lambda tensor: -tensor[2].itemsize):
        offsets[name], stop = stop, stop + math.prod(shape) * dtype.itemsize
        fields[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": (offsets[name], stop)}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, {name: 8 + len(text) + offset for name, offset in offsets.items()}
