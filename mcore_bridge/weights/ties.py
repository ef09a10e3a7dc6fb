"""Tensors that a checkpoint holds twice: are both the same, as a model has them that keeps one of them?

The common case is a head beside the embedding that it is tied to. What the installed transformers does of it
(``tie_weights`` in ``modeling_utils.py``) we do as well. Release 5 ties where both are equal, or one of them is
missing, whichever it is; where they differ it does not. Release 4 ties in any case, and does not load a head alone.
"""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from mcore_bridge.errors import CheckpointError
from mcore_bridge.rules.encoded import Encoded
from mcore_bridge.weights.files.decoded import Decoded, DecodedCheckpoint, Folder, Stored, opened_folder
from mcore_bridge.weights.files.hf_folder import Checkpoint
from mcore_bridge.weights.files.positional_io import array_of

if TYPE_CHECKING:
    from mcore_bridge.rules.mapping import WeightMapping

Value = TypeVar("Value")

HEAD = "lm_head.weight"
_PIECE_BYTES = 4 << 20
_known: dict[tuple[object, ...], bool] = {}
"""What comparisons of tensors in files have found, in this process, by the names of both and the state of the files."""
logger = logging.getLogger("mcore_bridge")


def is_tied(folder: str, names: Iterable[str], embedding: str) -> bool:
    """Whether the head of a checkpoint is its embedding, where its config says so.

    Args:
        folder: of the checkpoint.
        names: of its tensors.
        embedding: what it calls the embedding.

    Raises:
        CheckpointError: both are in files that cannot be read.
    """
    if not {HEAD, embedding} <= {*names} or are_equal(opened_folder(Checkpoint(folder)), embedding, HEAD):
        return True
    said = f"{HEAD} of {folder} differs from {embedding}, though its config says tie_word_embeddings=True"
    if ties_any_head():
        _warn(f"{said}: it is not used, as transformers 4 does not use it either, while transformers 5 does")
        return True
    _warn(f"{said}: the model has a head of its own, as in transformers 5, and what is saved says False")
    return False


@functools.cache
def ties_any_head() -> bool:
    """Whether the installed transformers ties where the config says so, whatever a checkpoint holds."""
    from transformers import __version__

    return int(__version__.split(".")[0]) < 5


@functools.cache
def _warn(message: str) -> None:
    """Once in a process, as a folder is asked about several times."""
    logger.warning(message)


def are_equal(source: Mapping[str, Stored], one: str, other: str) -> bool:
    """Whether two tensors have the same shape and values, as ``torch.equal`` has it, whatever their dtypes.

    They are read in pieces, up to the first that differs. Of files, a process does so once. Equal tensors of 1 GB take
    about a second where the page cache has both.
    """
    if not isinstance(source, Checkpoint | DecodedCheckpoint):
        return _compare(source, one, other)
    key = (one, other, *_state(source, one), *_state(source, other))
    if key not in _known:
        _known[key] = _compare(source, one, other)
    return _known[key]


def _state(source: Folder, name: str) -> tuple[object, ...]:
    return tuple(_identity(str(file.path)) for file in source.files_of(name))


def _identity(path: str) -> tuple[object, ...]:
    found = os.stat(path)
    return path, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _compare(source: Mapping[str, Stored], one: str, other: str) -> bool:
    if tuple(source[one].shape) != tuple(source[other].shape):
        return False
    pieces = zip(_pieces(source, one), _pieces(source, other), strict=True)
    return all(_same(left, right) for left, right in pieces)


def _same(left: Tensor, right: Tensor) -> bool:
    if left.dtype != right.dtype:  # of which neither may hold the values of the other
        left, right = left.double(), right.double()
    return torch.equal(left, right.to(left.device))


def _pieces(source: Mapping[str, Stored], name: str) -> Iterator[Tensor]:
    """A tensor in pieces of some rows: as many whatever its dtype, so that two of one shape fit together."""
    tensor = source[name]
    if not isinstance(tensor, Encoded):
        tensor = torch.atleast_1d(tensor)
    row = math.prod(tensor.shape[1:]) * torch.float64.itemsize
    num_rows = max(1, _PIECE_BYTES // max(1, row))
    for start in range(0, tensor.shape[0], num_rows):
        piece = tensor[start : start + num_rows]
        if not isinstance(piece, Tensor):
            yield piece.to(torch.bfloat16)
        elif isinstance(source, Checkpoint | DecodedCheckpoint):
            # By position, as a load does: a file may become shorter meanwhile.
            held = torch.empty(piece.shape, dtype=piece.dtype)
            source.files_of(name)[0].read([piece], array_of(held))
            yield held
        else:
            yield piece


def require_equal(source: Mapping[str, Stored], mapping: WeightMapping) -> None:
    """Raise unless the further names of a tensor that a source has stand for the same tensor.

    Raises:
        CheckpointError: naming all that do not.
    """
    found = [(name, original) for name, original in mapping.twins.items() if name in source and original in source]
    differ = [(name, original) for name, original in found if not are_equal(source, original, name)]
    if differ:
        raise differing(mapping, differ)


def differing(mapping: WeightMapping, pairs: Sequence[tuple[str, str]]) -> CheckpointError:
    """What to say of tensors that differ, though a model has one parameter for both."""
    names = [name for name, _ in pairs]
    said = "; ".join(f"{name} differs from {original}" for name, original in pairs)
    advice = []
    if HEAD in names:
        advice.append(
            "transformers does not tie such a head: set tie_word_embeddings=False in the HF config that the model is "
            "built from, or build it from the folder that holds both tensors"
        )
    if any(mapping.is_copy(name) for name in names):
        advice.append(
            "MTP layers of megatron-core have no embedding or head of their own: build without MTP layers, or leave "
            "these names out of what is loaded"
        )
    return CheckpointError(f"{said}, and the model has one parameter for both; {'; '.join(advice)}")


def renamed(source: Mapping[str, Value], mapping: WeightMapping) -> Mapping[str, Value]:
    """``source`` with the tied embedding under its own name, where it has it under that of the head alone.

    A ``Checkpoint``, decoded or not, is changed in place.
    """
    for name, original in mapping.spare.items():
        if name not in source or original in source:
            continue
        if isinstance(source, Checkpoint | Decoded):
            source.rename(name, original)
        else:
            source = _Renamed(source, name, original)
    return source


def opened(folder: str | os.PathLike[str], mapping: WeightMapping) -> Folder:
    """The checkpoint of a folder, as ``renamed`` has it, with encoded weights as if they were plain."""
    checkpoint = opened_folder(Checkpoint(folder))
    renamed(checkpoint, mapping)
    return checkpoint


class _Renamed(Mapping[str, Value]):
    def __init__(self, source: Mapping[str, Value], old: str, new: str) -> None:
        self._source, self._old, self._new = source, old, new

    def __getitem__(self, name: str) -> Value:
        if name == self._old:
            raise KeyError(name)
        return self._source[self._old if name == self._new else name]

    def __iter__(self) -> Iterator[str]:
        return (self._new if name == self._old else name for name in self._source)

    def __len__(self) -> int:
        return len(self._source)
