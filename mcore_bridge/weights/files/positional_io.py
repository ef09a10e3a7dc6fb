"""Reads, writes and maps open files at offsets. Threads may do this in parallel: they share no position and release the
GIL.

A load reads files and does not map them. So a file that has become shorter is an error and no signal, and the kernel
reads ahead. All processes of a node share the kernel's page cache. A map keeps no descriptor, so a process may have
more maps than open files.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from mcore_bridge.foreign_files import FULL
from mcore_bridge.weights.files.open_files import with_room

if TYPE_CHECKING:
    from numpy.typing import NDArray


Array: TypeAlias = "NDArray[Any]"

BLOCK_BYTES = 1 << 18  # bytes of an array with gaps that are read at once; they should stay in a core's cache
_MOST_BUFFERS = 1024  # of one call, as POSIX's IOV_MAX is on Linux


def read_array(fd: int, offset: int, out: Array, strides: tuple[int, ...]) -> None:
    """Read a strided array from a file.

    Small gaps are read with the array, because a second call costs more.

    Args:
        offset: the byte of the file at which the array begins.
        out: the array to fill, C-contiguous.
        strides: distances in the file, in bytes.

    Raises:
        EOFError: the file ends before the array does.
    """
    if _is_dense(out.shape, strides, out.itemsize):
        _read(fd, offset, out)
        return
    row = out.itemsize + sum((size - 1) * stride for size, stride in zip(out.shape[1:], strides[1:], strict=True))
    if len(out) == 1 or row > BLOCK_BYTES:
        for index in range(len(out)):
            read_array(fd, offset + index * strides[0], out[index], strides[1:])
        return
    num_rows = (BLOCK_BYTES - row) // strides[0] + 1
    block = np.empty((min(num_rows, len(out)) - 1) * strides[0] + row, np.uint8)
    for start in range(0, len(out), num_rows):
        part = out[start : start + num_rows]
        _read(fd, offset + start * strides[0], block[: (len(part) - 1) * strides[0] + row])
        np.copyto(part, np.ndarray(part.shape, part.dtype, block, strides=strides))


def read_scattered(fd: int, parts: Iterable[tuple[int, memoryview]]) -> None:
    """Read parts of a file into buffers. One call reads adjacent parts, since a call costs more than a small part.

    Args:
        parts: the byte of the file at which each begins, and its buffer of bytes.

    Raises:
        EOFError: the file ends before a part does.
    """
    run: list[memoryview] = []
    start = stop = 0
    for offset, buffer in sorted(parts, key=itemgetter(0)):
        if offset != stop or len(run) == _MOST_BUFFERS:
            _read_into(fd, start, run)
            run, start = [], offset
        run.append(buffer)
        stop = offset + len(buffer)
    _read_into(fd, start, run)


def write_bytes(fd: int, offset: int, data: Array) -> None:
    """Write all of ``data`` (C-contiguous) to a file, from byte ``offset`` on."""
    left = data.reshape(-1).view(np.uint8).data
    while left:
        written = os.pwrite(fd, left, offset)
        left, offset = left[written:], offset + written


def _read(fd: int, offset: int, out: Array) -> None:
    _read_into(fd, offset, [out.reshape(-1).view(np.uint8).data])


def _read_into(fd: int, offset: int, buffers: list[memoryview]) -> None:
    """Read consecutive bytes of a file into buffers. The list of buffers is emptied."""
    while left := sum(map(len, buffers)):
        read = os.preadv(fd, buffers, offset)
        if not read:
            raise EOFError(f"the file ends {left} bytes before byte {offset + left}")
        offset += read
        while buffers and read >= len(buffers[0]):
            read -= len(buffers.pop(0))
        if buffers:
            buffers[0] = buffers[0][read:]


def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Whether an array has no gaps and is row-major."""
    expected = itemsize
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


class _Memory:
    """A tensor's memory in numpy's array interface. (``Tensor.numpy`` would forbid a trainer to resize the tensor.)"""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor  # the tensor must live as long as the array
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"<i{tensor.itemsize}",
            "shape": tuple(tensor.shape),
            "data": (tensor.data_ptr(), False),
        }


def array_of(tensor: Tensor) -> Array:
    """A contiguous CPU tensor as an array of integers of equal size, since numpy lacks some of torch's dtypes."""
    assert tensor.is_contiguous()
    return np.asarray(_Memory(tensor)) if tensor.numel() else np.empty(tensor.shape, f"<i{tensor.itemsize}")


_libc = ctypes.CDLL(None)


def mapped(path: str, num_bytes: int) -> Array:
    """The first bytes of a file, uint8. Writes to them stay in this process.

    Args:
        path: the path of the file, or of an open descriptor of the caller.

    Raises:
        RuntimeError: the file cannot be mapped.
    """
    storage: Any = with_room(lambda: torch.UntypedStorage.from_file(path, False, num_bytes), held=1, is_full=_is_full)
    array: Array = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    return array


def free_pages(address: int, num_bytes: int) -> None:
    """Free the memory of pages of a map that were read; they stay in the page cache."""
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(address + num_bytes - start), mmap.MADV_DONTNEED)


def _is_full(error: Exception) -> bool:
    return isinstance(error, RuntimeError) and any(f"({number})" in str(error) for number in FULL)
