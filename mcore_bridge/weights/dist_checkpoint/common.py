"""The ``common`` part of a checkpoint: one rank writes it for all ranks, so all must pass equal values."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mcore_bridge.errors import CheckpointError, shown
from mcore_bridge.rules.dtypes import has_same_bits
from mcore_bridge.weights.transfer.collectives import Group


def require_equal(group: Group, common: Mapping[str, Any]) -> None:
    """Raise on all ranks unless their values of ``common`` are equal. Its keys are equal on every rank.

    If all digests are equal, nothing more is compared. Otherwise values are compared as objects, since pickles of equal
    sets may differ.

    Raises:
        CheckpointError: naming the keys.
    """
    digests = group.all_gather_object({key: hashlib.sha256(_bytes(value)).hexdigest() for key, value in common.items()})
    suspect = sorted(key for key in common if len({digest[key] for digest in digests}) > 1)
    if not suspect:
        return
    held = group.all_gather_object({key: common[key] for key in suspect})
    others = {key: [not _is_equal(held[0][key], own[key]) for own in held] for key in suspect}
    differ = {key: flags.index(True) for key, flags in others.items() if any(flags)}
    if differ:
        values = [
            f"{key}: {shown(held[0][key])} on rank 0, {shown(held[rank][key])} on rank {rank}"
            for key, rank in [*differ.items()][:4]
        ]
        raise CheckpointError(
            f"expected equal values in common on every rank, since one rank writes them, found others at "
            f"{[*differ][:8]} ({'; '.join(values)}); pass equal values, and let each rank save its own state itself"
        )


def _bytes(value: object) -> bytes:
    return pickle.dumps(value)


def _is_equal(one: object, other: object) -> bool:
    """Whether two values are equal. A value without a usable ``==``, such as an array, is compared as a pickle."""
    if isinstance(one, Tensor):
        return has_same_bits(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_is_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    if _bytes(one) == _bytes(other):
        return True
    try:
        return bool(one == other)
    except (TypeError, ValueError, RuntimeError):
        return False
