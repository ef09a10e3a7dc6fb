"""One file of the safetensors format: a JSON header, and behind it a range of bytes for each tensor.

https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import os
import struct
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors import __version__ as version
from torch import Tensor

from mcore_bridge.errors import CheckpointError
from mcore_bridge.foreign_files import READ, parse, too_many
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.files.open_files import OpenFile, open_file, with_room
from mcore_bridge.weights.files.positional_io import (
    Array,
    array_of,
    free_pages,
    mapped,
    read_array,
    read_scattered,
    write_bytes,
)

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
    "C64": "complex64",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, ours) for name, ours in _DTYPES.items() if hasattr(torch, ours)}
"""The dtypes of the installed torch by their names in the format. torch lacks the format's two dtypes of 6 bits."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_PAIRS = "F4"
"""A dtype that torch stores as two values per element. So torch's last dim is half of the format's."""
_FIELDS = ("dtype", "shape", "data_offsets")


class _Entry(NamedTuple):
    """A tensor in the header. Its bytes are ``start`` to ``stop`` of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsFile:
    """A file to read. The whole header is checked when the file is opened; data is touched when tensors are read.

    The ``safetensors`` library decides whether a header is valid; for this it opens and closes the file. We add one
    rule: no key may occur twice (the library uses the last one). Header and data always come from one file, even if
    another process replaces the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = OpenFile(path, READ, open_file(path))
        weakref.finalize(self, self._file.close)
        with self._file.descriptor() as fd:
            self._stamp = _stamp(fd)
            opened = f"/dev/fd/{fd}"  # another file may be at the path now
            opened, size = opened if os.path.exists(opened) else str(path), os.fstat(fd).st_size
            self._require_whole(opened, size)
            try:
                self._map = mapped(opened, size)
            except RuntimeError as error:
                raise CheckpointError(f"cannot map {path}: {error}; copy it to another file system") from None
        self.entries = self._read_header()

    def _require_whole(self, opened: str, size: int) -> None:
        def is_full(error: Exception) -> bool:
            return isinstance(error, FileNotFoundError) and os.path.exists(opened)  # the text of the library's error

        try:
            with_room(lambda: safe_open(opened, "numpy").__exit__(None, None, None), held=1, is_full=is_full)
        except SafetensorError as error:
            if "unknown variant" in str(error):  # an unknown dtype; the file is not damaged
                raise CheckpointError(
                    f"{self.path} has a dtype that is not supported by the installed safetensors {version}: {error}; "
                    "install a newer one, or save the file in other dtypes"
                ) from None
            raise CheckpointError(
                f"{self.path} has {size} bytes and is no complete safetensors file, by the error of the safetensors "
                f"library ({error}): it is damaged or truncated; copy it again"
            ) from None
        except FileNotFoundError:
            raise too_many(self.path) from None
        except (OSError, MemoryError) as error:
            raise CheckpointError(f"cannot map {self.path}: {error}; copy it to another file system") from None

    def _read_header(self) -> dict[str, _Entry]:
        base = 8 + struct.unpack("<Q", self._map[:8].tobytes())[0]
        try:
            header = parse(self._map[8:base].tobytes())
        except ValueError as error:
            raise CheckpointError(f"the header of {self.path} is damaged: {error}; save the file again") from None
        return {name: _entry(value, base) for name, value in header.items() if name != "__metadata__"}

    def tensor(self, name: str) -> Tensor:
        """The tensor as a view of the mapped file.

        Raises:
            CheckpointError: the file is good, but torch lacks the dtype or cannot have the shape. Or the file has
                become shorter since it was opened: access to the missing part of a map would kill the process.
        """
        entry = self.entries[name]
        with self._file.descriptor() as fd:
            size = os.fstat(fd).st_size
        if size < entry.stop:
            raise CheckpointError(
                f"{self.path} has {size} bytes, and had {entry.stop} or more when it was opened: stop the program that "
                "writes to it, and copy it again"
            )
        dtype, shape = DTYPES.get(entry.dtype), _shape_in_torch(entry)
        try:
            if dtype is None or shape is None:
                raise TypeError("torch has no such dtype" if dtype is None else "torch stores two values in an element")
            if entry.start == entry.stop:
                return torch.empty(shape, dtype=dtype)
            count = (entry.stop - entry.start) // dtype.itemsize
            return torch.frombuffer(self._map, dtype=dtype, count=count, offset=entry.start).view(shape)
        except (RuntimeError, TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(
                f"{name} in {self.path} is {entry.dtype} of shape {entry.shape}, which is not supported with torch "
                f"{torch.__version__}: {error}; save the tensor in another dtype and shape"
            ) from None

    def read(self, views: Sequence[Tensor], out: Array) -> None:
        """Read slices of the file's tensors into ``out``, one behind the other. The map is not used.

        Adjacent slices are read at once, in any order of ``views``.

        Args:
            views: slices of tensors of one dtype.
            out: the array to fill, from ``array_of``.

        Raises:
            CheckpointError: the file cannot be read, or has become shorter since it was opened.
        """
        octets, place = out.reshape(-1).view(np.uint8), 0
        dense: list[tuple[int, memoryview]] = []
        try:
            with self._file.descriptor() as fd:
                for view in views:
                    offset, stop = view.data_ptr() - self._map.ctypes.data, place + view.nbytes
                    if view.is_contiguous():
                        dense.append((offset, octets.data[place:stop]))
                    else:
                        strides = tuple(stride * view.itemsize for stride in view.stride())
                        read_array(fd, offset, octets[place:stop].view(out.dtype).reshape(view.shape), strides)
                    place = stop
                read_scattered(fd, dense)
        except (OSError, EOFError) as error:
            raise CheckpointError(f"cannot read {self.path}: {error}; copy it again") from None

    def require_unchanged(self) -> None:
        """Raise if the file was written to after it was opened, since the bytes that were read may mix both versions.

        Raises:
            CheckpointError: naming the file.
        """
        try:
            with self._file.descriptor() as fd:
                now: object = _stamp(fd)
        except OSError:  # it was closed because too many were open, and is gone
            now = None
        if now != self._stamp:
            raise CheckpointError(
                f"{self.path} was changed while it was read: wait for the program that writes to it, and read it again"
            )

    def release(self, name: str) -> None:
        """Free the memory of pages that were read for ``name``; they stay in the page cache."""
        entry = self.entries[name]
        free_pages(self._map.ctypes.data + entry.start, entry.stop - entry.start)


def _stamp(fd: int) -> tuple[int, int]:
    """Size and time of the last write. A save that puts another file at the path does not change them."""
    status = os.fstat(fd)
    return status.st_size, status.st_mtime_ns


def _entry(value: Any, base: int) -> _Entry:
    """The entry of a header for one tensor.

    The library also accepts the fields as an array, and a dtype as an object with one key and the value null.
    """
    fields = value if isinstance(value, dict) else dict(zip(_FIELDS, value, strict=True))
    (dtype,) = [fields["dtype"]] if isinstance(fields["dtype"], str) else fields["dtype"]
    start, stop = fields["data_offsets"]
    return _Entry(dtype, tuple(fields["shape"]), base + start, base + stop)


def _shape_in_torch(entry: _Entry) -> tuple[int, ...] | None:
    if entry.dtype != _PAIRS:
        return entry.shape
    *rest, last = entry.shape
    return None if last % 2 else (*rest, last // 2)


class SafetensorsWriter:
    """A new file. Its header is written at once; bytes of tensors follow in any order, from any thread."""

    def __init__(self, path: Path, specs: Iterable[TensorSpec]) -> None:
        header, self._starts = _lay_out(specs)
        flags = os.O_WRONLY | os.O_CLOEXEC
        self._file = OpenFile(path, flags, with_room(lambda: os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)))
        try:
            with self._file.descriptor() as fd:
                write_bytes(fd, 0, array_of(torch.frombuffer(bytearray(header), dtype=torch.uint8)))
        except OSError:
            self._file.close()
            raise

    def write(self, name: str, start: int, data: Tensor) -> None:
        """Write ``data`` (contiguous, on CPU) into the tensor ``name``, from byte ``start`` on."""
        with self._file.descriptor() as fd:
            write_bytes(fd, self._starts[name] + start, array_of(data))

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()


def _lay_out(specs: Iterable[TensorSpec]) -> tuple[bytes, dict[str, int]]:
    """The header, and the byte at which each tensor begins. Wide dtypes come first, so that all are aligned."""
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets, stop = {}, 0
    for spec in sorted(specs, key=lambda spec: -spec.dtype.itemsize):
        name, shape, dtype = spec.name, spec.shape, spec.dtype
        offsets[name], stop = stop, stop + spec.num_bytes
        own = _NAMES.get(dtype)
        if own is None or (own == _PAIRS and not shape):
            raise CheckpointError(f"{name} is {dtype} of shape {shape}, which safetensors lacks: cast it with dtype=")
        logical = (*shape[:-1], 2 * shape[-1]) if own == _PAIRS else shape
        fields[name] = {"dtype": own, "shape": logical, "data_offsets": (offsets[name], stop)}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, {name: 8 + len(text) + offset for name, offset in offsets.items()}
