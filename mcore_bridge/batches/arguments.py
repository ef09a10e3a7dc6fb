"""Arguments of a wrong type: what was expected of each, and what was found."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mcore_bridge.config.sizes import is_count
from mcore_bridge.errors import BatchError, shown


def require(*problems: Iterator[str]) -> None:
    """Raise ``BatchError`` with all that is wrong with some arguments, if anything is."""
    if texts := [text for of_one in problems for text in of_one]:
        raise BatchError("; ".join(texts))


def ids(name: str, value: object, device: torch.device | None = None) -> Iterator[str]:
    """What is wrong with token ids: int64, on the device of the model if one is given."""
    if not isinstance(value, Tensor) or value.dtype != torch.int64:
        advice = f": pass {name}.long()" if isinstance(value, Tensor) else ""
        yield f"{name} must be an int64 tensor [batch, seq], found {kind_of(value)}{advice}"
    else:
        yield from _elsewhere(name, value, device)


def mask(name: str, value: object, device: torch.device | None = None) -> Iterator[str]:
    """What is wrong with a mask, which is a tensor or None."""
    if value is not None and not isinstance(value, Tensor):
        yield f"{name} must be a tensor [batch, seq] or None, found {kind_of(value)}"
    elif value is not None:
        yield from _elsewhere(name, value, device)


def flag(name: str, value: object) -> Iterator[str]:
    """What is wrong with a flag."""
    if not isinstance(value, bool):
        yield f"{name} must be True or False, found {shown(value)}"


def count(name: str, value: object, *, least: int = 1, optional: bool = False) -> Iterator[str]:
    """What is wrong with a number of rows or tokens."""
    is_zero = least == 0 and value == 0 and isinstance(value, int) and not isinstance(value, bool)
    if not (is_count(value) or is_zero or (optional and value is None)):
        yield f"{name} must be a whole number of at least {least}, found {shown(value)}; leave it out for the default"


def kind_of(value: object) -> str:
    """A value for a message: the dtype and shape of a tensor, or else its type."""
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _elsewhere(name: str, value: Tensor, device: torch.device | None) -> Iterator[str]:
    if device is not None and value.device != device:
        yield f"{name} must be on {device} as the model is, found {value.device}: pass {name}.to({str(device)!r})"
