"""Reads and checks the ``.metadata`` of a ``torch_dist`` folder, which is a pickle, without running code in it.

A pickle may name any function; here it may only name the classes of torch's metadata. Its values may still be wrong:
files outside of the folder, or chunks that do not cover a tensor. So the values are checked.
"""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from enum import Enum
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mcore_bridge.errors import CheckpointError, describe
from mcore_bridge.foreign_files import read_bounded

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

NAME = ".metadata"
_MOST_BYTES = 1 << 30
"""About ten times the bytes that the largest models need."""
_MOST_ODD = 20_000
"""The most chunks of a tensor that are compared pairwise, if they form no grid. The chunks of a mesh form a grid."""
_TORCH = frozenset(f"torch.distributed.checkpoint.{name}" for name in ("metadata", "planner", "filesystem", "storage"))
"""Modules whose data classes and enums metadata consist of; megatron-core adds the plans of all ranks."""
_OTHERS = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath", "PurePosixPath"),
    "pathlib._local": ("PosixPath", "PurePosixPath"),
    "collections": ("OrderedDict",),
    "numpy": ("dtype",),
    "numpy.core.multiarray": ("scalar",),
    "numpy._core.multiarray": ("scalar",),
}
"""Other names that metadata may contain, by module. None of them runs code from a pickle."""
_FORCES, _FORBIDS = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


class _DataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return a class that metadata may contain; raise for other names."""
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if name in _OTHERS.get(module, ()) or (module in _TORCH and "." not in name):
            value = super().find_class(module, name)
            is_data = isinstance(value, type) and (is_dataclass(value) or issubclass(value, Enum))
            if module in _OTHERS or is_data:
                return value
        raise pickle.UnpicklingError(f"it names {module}.{name}, which might run code")


def unpickled(data: bytes) -> Any:
    """The metadata, or torch's results of writing, in a pickle. No code in it is run.

    Raises:
        Exception: the pickle is something else; damaged pickles may raise any error.
    """
    return _DataUnpickler(BytesIO(data)).load()


def read_metadata(folder: Path) -> Metadata:
    """The metadata of a folder.

    Raises:
        CheckpointError: it cannot be read, names files outside of the folder, or has other values than numbers and
            names.
    """
    path = folder / NAME
    try:
        metadata: Metadata = unpickled(read_bounded(path, _MOST_BYTES))
    except Exception as error:
        raise CheckpointError(
            f"{folder} has no readable {NAME} ({describe(error):.300}); copy the folder again"
        ) from None
    if problem := next(_problems(metadata), None):
        raise CheckpointError(f"{path} is damaged: {problem}; copy the folder again")
    return metadata


def _problems(metadata: object) -> Iterator[str]:
    """Yield the faults that no writer of torch makes."""
    from torch.distributed.checkpoint import metadata as of_torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    tensors, places = (_attribute(metadata, name, dict) for name in ("state_dict_metadata", "storage_data"))
    if not isinstance(metadata, of_torch.Metadata) or tensors is None or places is None:
        yield f"expected torch's Metadata with its two dicts, found {type(metadata).__name__}"
        return
    for key, entry in tensors.items():
        if not isinstance(key, str) or not isinstance(
            entry, of_torch.TensorStorageMetadata | of_torch.BytesStorageMetadata
        ):
            yield f"{key!r:.200} is no tensor and no object"
        elif isinstance(entry, of_torch.TensorStorageMetadata) and not _is_described(entry):
            yield f"{key!r} has no dtype, or chunks that are no boxes"
    for index, place in places.items():
        name = _attribute(place, "relative_path", str)
        spans = [_attribute(place, field, int) for field in ("offset", "length")]
        if not isinstance(index, of_torch.MetadataIndex) or not isinstance(place, _StorageInfo):
            yield f"{index!r:.200} has no place in a file"
        elif name is None or os.path.basename(name) != name or name in ("", ".", "..") or "\0" in name:
            yield f"expected names of files in the folder, found {_attribute(place, 'relative_path', object)!r:.200}"
        elif any(span is None or span < 0 for span in spans):
            yield f"{index.fqn!r:.200} has the place {spans} in {name}"


def _attribute(value: object, name: str, kind: type) -> Any:
    held = getattr(value, name, None)
    return held if isinstance(held, kind) else None


def _is_described(tensor: TensorStorageMetadata) -> bool:
    size, chunks = _attribute(tensor, "size", torch.Size), _attribute(tensor, "chunks", list)
    boxes = [
        (_attribute(chunk, "offsets", torch.Size), _attribute(chunk, "sizes", torch.Size)) for chunk in chunks or ()
    ]
    return (
        isinstance(getattr(tensor.properties, "dtype", None), torch.dtype)
        and size is not None
        and chunks is not None
        and all(box is not None and len(box) == len(size) for pair in boxes for box in pair)
    )


def is_tiled(tensor: TensorStorageMetadata) -> bool:
    """Whether the chunks of a tensor cover it whole, each element once.

    torch does not check this. Elements that no chunk covers would keep their old values.
    """
    boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in tensor.chunks]
    if any(
        start < 0 or size < 0 or start + size > whole
        for box in boxes
        for start, size, whole in zip(*box, tensor.size, strict=True)
    ):
        return False
    boxes = [box for box in boxes if math.prod(box[1])]
    if sum(math.prod(sizes) for _, sizes in boxes) != math.prod(tensor.size):
        return False
    edges = [sorted({0, whole, *(box[0][dim] for box in boxes)}) for dim, whole in enumerate(tensor.size)]
    after = [dict(pairwise(starts)) for starts in edges]
    is_grid = all(
        after[dim].get(start) == start + size
        for box in boxes
        for dim, (start, size) in enumerate(zip(*box, strict=True))
    )
    if is_grid:  # the usual case: each chunk is one cell, so the sum above shows that no cell is missing
        return len({starts for starts, _ in boxes}) == len(boxes)
    return len(boxes) <= _MOST_ODD and _are_apart(boxes)


def _are_apart(boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Whether no two boxes have an element in common."""
    starts, sizes = (np.array(values, dtype=np.int64) for values in zip(*boxes, strict=True))
    stops = starts + sizes
    return not any(
        bool(((starts[:i] < stops[i]) & (stops[:i] > starts[i])).all(axis=1).any()) for i in range(1, len(boxes))
    )


@contextmanager
def without_code() -> Iterator[None]:
    """Forbid torch to run code in objects that it unpickles itself, such as extra states of modules.

    If the user has already forbidden this by torch's environment variable, nothing is changed.
    """
    if os.environ.get(_FORBIDS) or os.environ.get(_FORCES):
        yield
        return
    os.environ[_FORCES] = "1"
    try:
        yield
    finally:
        del os.environ[_FORCES]
