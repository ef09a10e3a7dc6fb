"""The dtype of a tensor on its way between HF and megatron-core. A tensor is cast only if the caller requests it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mcore_bridge.errors import FEW

if TYPE_CHECKING:
    from mcore_bridge.rules.encoded import Encoded, EncodedSlice

logger = logging.getLogger("mcore_bridge")
AUTO = "auto"
"""In place of a dtype: as the source has it."""
DtypeLike = torch.dtype | str
"""A dtype, or its name such as "bfloat16"."""
Dtypes = DtypeLike | Mapping[str, DtypeLike] | None
"""One dtype for all tensors; or dtypes by ``fnmatch`` patterns of HF names (the first match counts).

None and "auto" keep the dtype of each tensor.
"""

_WIDENINGS = {
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.int32, torch.int64),
}


def wanted_dtype(name: str, own: torch.dtype, dtypes: Dtypes) -> torch.dtype:
    """The target dtype of the HF tensor ``name``, which is stored as ``own``. Integer tensors keep their dtype.

    >>> wanted_dtype("model.norm.weight", torch.bfloat16, {"*.norm.weight": torch.float32})
    torch.float32
    """
    if not own.is_floating_point:
        return own
    if isinstance(dtypes, Mapping):
        dtypes = next((dtype for pattern, dtype in dtypes.items() if fnmatchcase(name, pattern)), None)
    return as_dtype(dtypes) or own


def as_dtype(dtype: DtypeLike | None) -> torch.dtype | None:
    """The dtype that an argument means: of a name, the dtype; None for "auto". Wrong values stay, for a later check."""
    named: torch.dtype | None = getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype  # type: ignore[arg-type]
    return None if dtype == AUTO else named


def problem_of(dtypes: object) -> str:
    """The reason why ``dtypes`` is not a valid ``Dtypes``, or an empty string."""
    values = [*dtypes.values()] if isinstance(dtypes, Mapping) else [dtypes]
    wrong = [value for value in values if not _is_floating(value)]
    if dtypes is None or not wrong:
        return ""
    return (
        'dtype must be a floating torch.dtype or its name such as "bfloat16", a dict of such by name patterns, or '
        f'"auto" or None, found {wrong[0]!r}: pass one of them'
    )


def _is_floating(value: object) -> bool:
    dtype = as_dtype(value) if isinstance(value, str) else value
    return value == AUTO or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)


def unmatched(dtypes: Dtypes, names: Iterable[str]) -> list[str]:
    """The patterns of ``dtypes`` that match none of ``names``: probably misspelled."""
    left = [*dtypes] if isinstance(dtypes, Mapping) else []
    known = frozenset(names) if left else frozenset()
    left = [pattern for pattern in left if pattern not in known]
    return [pattern for pattern in left if not any(fnmatchcase(name, pattern) for name in known)]


def is_exact(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether the dtype ``target`` has every value of ``source``."""
    return source == target or (source, target) in _WIDENINGS


def has_overflown(tensor: Tensor) -> bool:
    """Whether a tensor that was cast has infinite numbers in fp16. Nothing else is searched: bf16 has fp32's range."""
    return tensor.dtype == torch.float16 and bool(tensor.isinf().any())


def cast(name: str, tensor: Tensor | Encoded | EncodedSlice, dtype: torch.dtype) -> Tensor:
    """A tensor in another dtype. A warning names it if numbers have become infinite. Encoded tensors are decoded."""
    new = tensor.to(dtype)
    warn_of_overflow([name] * (new is not tensor and has_overflown(new)))
    return new


def warn_of_overflow(names: Collection[str]) -> None:
    """Log the names of tensors for which ``has_overflown`` is True, if there are any."""
    if names:
        logger.warning(
            "float16 holds numbers up to 65504, but a cast to it made larger ones infinite in %d tensors, such as %s: "
            "use bfloat16 or float32",
            *(len(names), [*names][:FEW]),
        )


def has_same_bits(tensor: Tensor, other: object) -> bool:
    """Whether two tensors have equal shape, dtype and bits, so that NaN equals NaN."""
    if not isinstance(other, Tensor) or (tensor.shape, tensor.dtype) != (other.shape, other.dtype):
        return False
    octets = [held.detach().cpu().contiguous().flatten().view(torch.uint8) for held in (tensor, other)]
    return torch.equal(*octets)


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")
