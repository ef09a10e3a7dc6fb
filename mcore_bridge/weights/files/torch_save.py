"""Files of ``torch.save`` with one tensor in memory at a time: laid out first and then filled, and read as maps."""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
import struct
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_bridge.errors import CheckpointError, describe
from mcore_bridge.weights.files.positional_io import array_of, write_bytes

_LOCAL_HEADER = struct.Struct("<26xHH")
"""Of a record of a zip file: the lengths of the name and of the extra field between it and the data."""


def write_torch_file(path: Path, content: object, tensors: Iterable[Tensor]) -> None:
    """Write a file that ``torch.load`` reads as ``content`` with the values of ``tensors`` in it.

    The checksums of its records are left out; ``torch.load`` does not look at them.

    Args:
        content: its tensors, of a storage each, say shapes and dtypes; what ``torch.empty`` makes takes no memory here.
        tensors: what they hold, in their order. Each is asked for when the one before it is written.

    Raises:
        CheckpointError: ``tensors`` are not those of ``content``.
    """
    with torch.serialization.skip_data():
        torch.save(content, path)
    with path.open("r+b") as file:
        for (start, size), tensor in zip(_storages(path), tensors, strict=True):
            if tensor.nbytes != size:
                raise CheckpointError(f"{path} has {size} bytes for a tensor of {tensor.nbytes}; report this")
            write_bytes(file.fileno(), start, array_of(tensor.contiguous()))
        os.fsync(file.fileno())


def _storages(path: Path) -> Iterator[tuple[int, int]]:
    """Where the bytes of each storage begin, and how many there are, in the order in which they were pickled."""
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        records = [(info.filename.split("/"), info) for info in archive.infolist()]
        data = {int(names[2]): info for names, info in records if names[1] == "data"}
        for _, info in sorted(data.items()):
            name, extra = _LOCAL_HEADER.unpack(os.pread(file.fileno(), _LOCAL_HEADER.size, info.header_offset))
            yield info.header_offset + _LOCAL_HEADER.size + name + extra, info.file_size


class Opaque:
    """Stands for an object of a class, or what a function made, that is not ours to call."""

    def __init__(self, *arguments: object) -> None:
        """Whatever it would be made of."""

    def __setstate__(self, state: object) -> None:
        """Whatever it would hold."""


def read_torch_file(path: Path) -> dict[str, Any]:
    """What ``torch.save`` wrote, its tensors as views of the mapped file.

    No code in it is run: in place of objects of classes that torch does not take for safe, such as the arguments of a
    trainer, there are ``Opaque`` ones. It cannot be so for subclasses of dict, list and Tensor.

    Raises:
        CheckpointError: it cannot be read so.
    """
    others: list[str] = []
    try:
        others = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        with torch.serialization.safe_globals([(Opaque, name) for name in others]):
            found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (pickle.UnpicklingError, TypeError, AttributeError, LookupError) as error:
        classes = ", ".join(sorted(others)) or "torch itself"
        raise CheckpointError(
            f"{path} holds what cannot be passed over, of {classes} ({describe(error).splitlines()[0]}); save it again "
            "with nothing but tensors, numbers and text beside the model"
        ) from None
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; copy it again") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} must hold a dict, found {type(found).__name__}: is it a checkpoint?")
    return found


def release(mapped: Tensor) -> None:
    """Give back the memory of pages that were read for a tensor of ``read_torch_file``; they stay in the page cache."""
    storage = mapped.untyped_storage()
    start = storage.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = storage.data_ptr() + storage.nbytes() - start
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_DONTNEED)
