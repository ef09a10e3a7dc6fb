"""Memory maps of files. A map keeps no descriptor, so there may be more maps than the limit of open files."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import torch

from mcore_bridge.weights.files.open_files import FULL, with_room
from mcore_bridge.weights.files.positional_io import Array

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
