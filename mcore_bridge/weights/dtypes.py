"""Which dtype a tensor crosses in. Nothing is cast unless the caller asks; what is asked is ``tensor.to(dtype)``."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch

Dtypes = torch.dtype | Mapping[str, torch.dtype] | None
"""One dtype for all; or ``fnmatch`` patterns of HF names to dtypes, the first that matches wins; or each its own."""

_WIDENINGS = {(torch.bfloat16, torch.float32), (torch.float16, torch.float32)}


def wanted_dtype(name: str, own: torch.dtype, dtypes: Dtypes) -> torch.dtype:
    """The dtype in which the HF tensor ``name``, stored as ``own``, crosses. Integer tensors keep theirs."""
    if dtypes is None or not own.is_floating_point:
        return own
    if isinstance(dtypes, torch.dtype):
        return dtypes
    return next((dtype for pattern, dtype in dtypes.items() if fnmatchcase(name, pattern)), own)


def problem_of(dtypes: object) -> str:
    """Why these are no ``Dtypes`` to cast weights to, if so."""
    asked = [*dtypes.values()] if isinstance(dtypes, Mapping) else [dtypes]
    wrong = [each for each in asked if not isinstance(each, torch.dtype) or not each.is_floating_point]
    if dtypes is None or not wrong:
        return ""
    return f"dtype must be a floating torch.dtype, patterns of names to such, or None, found {wrong[0]!r}"


def is_exact(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether every value of ``source`` is one of ``target``."""
    return source == target or (source, target) in _WIDENINGS


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")
