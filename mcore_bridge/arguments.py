"""Checks of the arguments that callers pass: their types, and paths of files and folders. A wrong argument raises.

Types are checked here only where the command line cannot get them wrong. An empty path raises; in pathlib it is the
working folder. Names and values that had other names in the release before are accepted, with a warning.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard, TypeVar

from mcore_bridge.errors import BridgeError, CheckpointError, shown


class Kind(NamedTuple):
    """A kind of arguments: its description, a function that checks a value, and what to do about a wrong value."""

    words: str
    is_good: Callable[[object], bool]
    advice: str

    def or_none(self) -> Kind:
        """The kind with None."""
        return Kind(f"{self.words}, or None", lambda value: value is None or self.is_good(value), self.advice)


def instance_of(words: str, *types: type, advice: str) -> Kind:
    """The kind of values that have one of these types."""
    return Kind(words, lambda value: isinstance(value, types), advice)


def list_of(words: str, *types: type, advice: str) -> Kind:
    """The kind of lists and tuples of values that have one of these types."""
    return Kind(words, lambda value: _is_list_of(value, lambda entry: isinstance(entry, types)), advice)


def require(error: type[BridgeError], **given: tuple[object, Kind]) -> None:
    """Raise ``error`` unless each value is of its kind. The message names all wrong values.

    >>> require(BridgeError, num_slots=(2, COUNT), seed=(0, WHOLE))
    """
    if problem := problem_of(**given):
        raise error(problem)


def problem_of(**given: tuple[object, Kind]) -> str:
    """The message that ``require`` would raise, or an empty string."""
    wrong = [(name, *pair) for name, pair in given.items() if not pair[1].is_good(pair[0])]
    return "; ".join(f"{name} must be {kind.words}, found {shown(value)}: {kind.advice}" for name, value, kind in wrong)


def is_count(value: object) -> TypeGuard[int]:
    """Whether ``value`` is a whole number of at least 1. A ``bool`` is not a number here."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def is_whole(value: object) -> TypeGuard[int]:
    """Whether ``value`` is a whole number that a tensor can hold. A ``bool`` is not a number here."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _is_device(value: object) -> bool:
    import torch

    if not isinstance(value, str | torch.device):
        return False
    try:
        torch.device(value)
    except RuntimeError:
        return False
    return True


def _is_list_of(value: object, is_good: Callable[[object], bool]) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes) and all(map(is_good, value))


def _is_tensor(value: object, dtype: str = "", device: object = None) -> bool:
    import torch

    if not isinstance(value, torch.Tensor):
        return False
    return (not dtype or str(value.dtype) == dtype) and device in (None, value.device)


def ids_on(device: object = None) -> Kind:
    """The kind of token ids, on the device of a model if one is given."""
    advice = f"pass torch.as_tensor(ids).long(){_move(device)}"
    return Kind(f"an int64 tensor{_place(device)}", lambda value: _is_tensor(value, "torch.int64", device), advice)


def tensor_on(device: object = None) -> Kind:
    """The kind of tensors, on the device of another one if that is given."""
    advice = f"pass torch.as_tensor(values){_move(device)}"
    return Kind(f"a tensor{_place(device)}", lambda value: _is_tensor(value, device=device), advice)


def _place(device: object) -> str:
    return "" if device is None else f" on {device}"


def _move(device: object) -> str:
    return "" if device is None else f".to({str(device)!r})"


WHOLE = Kind("a whole number", is_whole, "pass an int such as 1234")
COUNT = Kind("a whole number of at least 1", lambda value: is_count(value) and is_whole(value), "pass an int such as 1")
LEAST_0 = Kind(
    "a whole number of at least 0",
    lambda value: is_whole(value) and value >= 0,
    "pass an int such as 0",
)
FLAG = instance_of("True or False", bool, advice="pass one of the two")
COUNTS = Kind("a list of whole numbers", lambda value: _is_list_of(value, is_whole), "pass a list such as [2, 2]")
NAMES = list_of("a list of names", str, advice="pass a list, even of one name")
DEVICE = Kind(
    'a torch.device, or its name such as "cpu" or "cuda:0"', _is_device, 'pass "cpu", or "cuda" on a machine with GPUs'
)
FUNCTION = Kind("a function", callable, "pass the function itself, not its result")
MAPPING = instance_of("a mapping", Mapping, advice="pass a dict")
ITERABLE = Kind(
    "an iterable", lambda value: isinstance(value, Iterable) and not isinstance(value, str | bytes), "pass a list"
)


def given_path(path: str | os.PathLike[str], kind: type[BridgeError] = CheckpointError) -> Path:
    """The path of a folder or file from a caller. Every function and command calls this first.

    An unset variable often becomes ``Path("")``, which equals ``Path(".")``. So both are refused, and ``"."`` becomes
    the absolute path of the working folder.

    Args:
        path: the argument of the caller.
        kind: the error to raise.

    Raises:
        BridgeError: it is empty, no path, or holds a null byte.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str):
        raise kind(f"expected a path, found {shown(path)}: pass a string or a pathlib.Path")
    if not text or (not isinstance(path, str) and Path(path) == Path()):
        raise kind(
            "expected a path, found an empty string: is a variable not set? Set it, or pass a path",
            in_python="Path('') equals Path('.'): pass Path.cwd() for the working folder",
        )
    if "\0" in text:
        raise kind(f"expected a path, found a null byte in {shown(text)}: correct it")
    return Path.cwd() if Path(text) == Path() else Path(text)


FORMER_ARGUMENTS = {"dialect": "expert_format"}
"""Arguments that had another name in the release before, by this name."""
FORMER_VALUES = {"vision": {"carried": "text_only"}, "mtp": {"carried": "copied"}}
"""Values of arguments that had another name in the release before."""
_Called = TypeVar("_Called", bound=Callable[..., Any])


def accepts_former_names(called: _Called) -> _Called:
    """A decorator of functions and classes. Their arguments may have the names and values of the release before.

    Raises:
        TypeError: when it is called, if an argument is given by both names.

    Example:
        >>> @accepts_former_names
        ... def build(*, vision: str) -> str:
        ...     return vision
        >>> build(vision="carried")
        'text_only'
    """
    function = called.__init__ if isinstance(called, type) else called  # type: ignore[misc]  # decorated at once

    @wraps(function)
    def renewed(*args: Any, **given: Any) -> Any:
        for former in FORMER_ARGUMENTS.keys() & given.keys():
            if (name := FORMER_ARGUMENTS[former]) in given:
                raise TypeError(f"{called.__qualname__}() takes {name}= or its former name {former}=, found both")
            warn_of_former(f"{former}=", f"{name}=")
            given[name] = given.pop(former)
        for name in FORMER_VALUES.keys() & given.keys():
            if isinstance(value := given[name], str) and value in FORMER_VALUES[name]:
                warn_of_former(f"{name}={value!r}", f"{name}={FORMER_VALUES[name][value]!r}")
                given[name] = FORMER_VALUES[name][value]
        return function(*args, **given)

    if isinstance(called, type):
        called.__init__ = renewed  # type: ignore[misc]
        return called
    return renewed  # type: ignore[return-value]


class FormerName:
    """An attribute of a class under the name that it had in the release before.

    >>> class Report:
    ...     not_built = ("visual.weight",)
    ...     carried = FormerName("not_built")
    >>> Report().carried
    ('visual.weight',)
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._former = ""

    def __set_name__(self, owner: type, former: str) -> None:
        self._former = f"{owner.__name__}.{former}"

    def __get__(self, instance: object, owner: type) -> Any:
        if instance is None:
            return self
        warn_of_former(self._former, f"{owner.__name__}.{self._name}")
        return getattr(instance, self._name)


def warn_of_former(former: str, name: str) -> None:
    """Warn the code outside of this package that ``former`` is now ``name``."""
    depth = 1
    while (frame := sys._getframe(depth)).f_back and frame.f_globals.get("__name__", "").startswith("mcore_bridge"):
        depth += 1
    warnings.warn(
        f"{former} is now {name}: the former name works in this release, and not in the next",
        DeprecationWarning,
        stacklevel=depth + 1,
    )
