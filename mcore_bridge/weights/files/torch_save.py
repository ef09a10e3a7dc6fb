"""Files of ``torch.save``. A write keeps one tensor in memory at a time. A read maps the file."""

from __future__ import annotations

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
from mcore_bridge.weights.files.open_files import open_file
from mcore_bridge.weights.files.positional_io import array_of, free_pages, write_bytes

_LOCAL_HEADER = struct.Struct("<26xHH")
"""The header of a record of a zip file. It ends with the lengths of the name and of the extra field, which follow."""


def write_torch_file(path: Path, content: object, tensors: Iterable[Tensor]) -> None:
    """Write a file that ``torch.load`` reads as ``content``, with the values of ``tensors``.

    The checksums of its records are left out; ``torch.load`` does not check them.

    Args:
        content: an object whose tensors give shapes and dtypes. Each tensor has a separate storage, which takes no
            memory if ``torch.empty`` made it.
        tensors: the values, in this order. The next one is taken after the one before is written.

    Raises:
        CheckpointError: ``tensors`` do not have the sizes in ``content``.
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
    """Yield the first byte and the number of bytes of each storage, in the order in which they were pickled."""
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        records = [(info.filename.split("/"), info) for info in archive.infolist()]
        data = {int(names[2]): info for names, info in records if names[1] == "data"}
        for _, info in sorted(data.items()):
            name, extra = _LOCAL_HEADER.unpack(os.pread(file.fileno(), _LOCAL_HEADER.size, info.header_offset))
            yield info.header_offset + _LOCAL_HEADER.size + name + extra, info.file_size


class Opaque:
    """A placeholder for an object whose class or function must not be called."""

    def __init__(self, *arguments: object) -> None:
        """Ignore the arguments of the object."""

    def __setstate__(self, state: object) -> None:
        """Ignore the state of the object."""


def read_torch_file(path: Path) -> dict[str, Any]:
    """Read a file of ``torch.save``, with tensors as views of the mapped file.

    No code in the file is run. Objects of classes that torch considers unsafe, such as the arguments of a trainer,
    become ``Opaque``. Subclasses of dict, list and Tensor cannot be replaced in this way.

    Raises:
        CheckpointError: the file cannot be read, or holds such a subclass.
    """
    others: list[str] = []
    os.close(open_file(path))  # to open a FIFO would block
    try:
        _require_stored(path)
        others = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        with torch.serialization.safe_globals([(Opaque, name) for name in others]):
            content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (pickle.UnpicklingError, TypeError, AttributeError, LookupError) as error:
        classes = ", ".join(sorted(others)) or "torch itself"
        raise CheckpointError(
            f"{path} holds objects that cannot be skipped, of {classes} ({describe(error).splitlines()[0]}); save it "
            "again with only tensors, numbers and text beside the model"
        ) from None
    except (OSError, RuntimeError, EOFError, ValueError, MemoryError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"cannot read {path}: {error}; copy it again") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a dict, found {type(content).__name__}: is it a checkpoint?")
    return content


def _require_stored(path: Path) -> None:
    """Raise ``ValueError`` if a record claims to be larger than its bytes in the file: it could exhaust the memory."""
    if zipfile.is_zipfile(path):  # torch reports other faults
        with zipfile.ZipFile(path) as archive:
            if packed := [info.filename for info in archive.infolist() if info.file_size > info.compress_size]:
                raise ValueError(
                    f"{len(packed)} records are compressed, such as {packed[0]!r}; torch.save never does that"
                )


def release(mapped: Tensor) -> None:
    """Free the memory of pages that were read for a tensor of ``read_torch_file``; they stay in the page cache."""
    storage = mapped.untyped_storage()
    free_pages(storage.data_ptr(), storage.nbytes())
