"""Tensors that a checkpoint stores twice while the model has one parameter: both copies must be equal.

The usual case is a head beside the embedding to which it is tied. This module does what the installed transformers does
(``tie_weights`` in ``modeling_utils.py``). Release 5 ties the two if they are equal, or if one of them is missing. If
they differ, it does not tie them. Release 4 always ties them, and cannot load a folder with a head but no embedding.
"""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mcore_bridge.errors import CheckpointError
from mcore_bridge.rules.encoded import Encoded
from mcore_bridge.rules.variants import HEAD
from mcore_bridge.weights.source.source import Source, open_folder

if TYPE_CHECKING:
    from mcore_bridge.rules.mapping import WeightMapping

_PIECE_BYTES = 4 << 20
_known: dict[tuple[object, ...], bool] = {}
"""Results of comparisons of tensors in files, in this process, by both names and the state of the files."""
logger = logging.getLogger("mcore_bridge")


def is_tied(folder: str, names: Iterable[str], embedding: str, lm_head: str = HEAD) -> bool:
    """Whether the head of a checkpoint is really tied to its embedding, if its config has ``tie_word_embeddings=True``.

    Args:
        folder: the folder of the checkpoint.
        names: the names of its tensors.
        embedding, lm_head: the names of the embedding and the head.

    Raises:
        CheckpointError: both tensors exist, and their files cannot be read.
    """
    if not {lm_head, embedding} <= {*names} or are_equal(open_folder(folder), embedding, lm_head):
        return True
    warning = f"{lm_head} of {folder} differs from {embedding}, though its config says tie_word_embeddings=True"
    if ties_any_head():
        _warn(f"{warning}: it is not used, as in transformers 4, while transformers 5 uses it")
        return True
    _warn(f"{warning}: the model has a separate head, as in transformers 5, and saved configs say False")
    return False


@functools.cache
def ties_any_head() -> bool:
    """Whether the installed transformers follows ``tie_word_embeddings=True`` even if head and embedding differ."""
    from transformers import __version__

    return int(__version__.split(".")[0]) < 5


@functools.cache
def _warn(message: str) -> None:
    """Warn once in a process, because several calls check one folder."""
    logger.warning(message)


def are_equal(source: Source, one: str, other: str) -> bool:
    """Whether two tensors have equal shapes and values, in the sense of ``torch.equal``, for any dtypes.

    They are read in pieces, up to the first difference. A process compares each pair of tensors in files once. Equal
    tensors of 1 GB take about a second if the page cache has both.
    """
    files = (*source.files(one), *source.files(other))
    key = (one, other, *(_identity(str(file.path)) for file in files))
    if not files or key not in _known:
        is_same = tuple(source[one].shape) == tuple(source[other].shape) and all(
            _same(left, right) for left, right in zip(_pieces(source, one), _pieces(source, other), strict=True)
        )
        if not files:
            return is_same
        _known[key] = is_same
    return _known[key]


def _identity(path: str) -> tuple[object, ...]:
    status = os.stat(path)
    return path, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _same(left: Tensor, right: Tensor) -> bool:
    if left.dtype != right.dtype:  # neither dtype may hold all values of the other
        left, right = left.double(), right.double()
    return torch.equal(left, right.to(left.device))


def _pieces(source: Source, name: str) -> Iterator[Tensor]:
    """Yield a tensor in pieces of some rows. Their number depends on the shape only, so that two tensors match."""
    tensor = source[name]
    if not isinstance(tensor, Encoded):
        tensor = torch.atleast_1d(tensor)
    row = math.prod(tensor.shape[1:]) * torch.float64.itemsize
    num_rows = max(1, _PIECE_BYTES // max(1, row))
    for start in range(0, tensor.shape[0], num_rows):
        piece = tensor[start : start + num_rows]
        yield source.read(name, piece) if isinstance(piece, Tensor) else piece.to(torch.bfloat16)


def require_equal(source: Source, mapping: WeightMapping) -> None:
    """Check that the copies of a tensor under other names equal the tensor under its main name.

    Raises:
        CheckpointError: naming all tensors that differ.
    """
    originals = {name: mapping.original(name) for name in (source if mapping.twins else ())}
    pairs = [(name, own) for name, own in originals.items() if name != own and own in source]
    differ = [(name, original) for name, original in pairs if not are_equal(source, original, name)]
    if differ:
        raise differing(mapping, differ)


def differing(mapping: WeightMapping, pairs: Sequence[tuple[str, str]]) -> CheckpointError:
    """The error for copies that differ although the model has one parameter for them."""
    names = [name for name, _ in pairs]
    differences = "; ".join(f"{name} differs from {original}" for name, original in pairs)
    advice = []
    if any(name.endswith(HEAD) for name in names):
        advice.append(
            "transformers does not tie such a head: set tie_word_embeddings=False in the HF config that the model is "
            "built from, or build it from the folder that holds both tensors"
        )
    if any(mapping.is_copy(name) for name in names):
        advice.append(
            "MTP layers of megatron-core share the embedding and the head: build without MTP layers, or leave "
            "these names out of the source"
        )
    return CheckpointError(f"{differences}, and the model has one parameter for both; {'; '.join(advice)}")
