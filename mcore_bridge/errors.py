"""Every error that we raise on purpose. Each message says what was expected, what was found and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

FEW = 8
"""The largest number of ranks that a message names one by one."""
LONG = 160
"""Characters of a value that a message prints whole."""


class BridgeError(Exception):
    """Base class of all errors below. Catch it to handle all errors of this library.

    Example:
        >>> try:
        ...     mb.ParallelDims(sp=True)
        ... except mb.BridgeError as error:
        ...     print(type(error).__name__)
        MeshError
    """

    def __init__(self, *args: object, in_python: str = "") -> None:
        """Take a message. Names in it may come from files, so what would control a terminal is escaped.

        Args:
            in_python: what a caller from Python may do besides, as a note of the exception. A command, which shows the
                message alone, has no option for it.
        """
        super().__init__(*(printable(value) if isinstance(value, str) else value for value in args))
        if in_python:
            self.add_note(in_python)


class ConfigError(BridgeError, ValueError):
    """An HF config, an override or an architecture cannot be expressed exactly. Change the config or the override."""


class MeshError(BridgeError, ValueError):
    """The parallel dimensions cannot be built for this model or world size. Change ``ParallelDims``."""


class MappingError(BridgeError, LookupError):
    """A parameter has no rule, or a tensor has no parameter. Fix the architecture's rules, or the model."""


class CheckpointError(BridgeError, RuntimeError):
    """A source of HF tensors cannot be read, lacks tensors, or has tensors that the model lacks. Fix the source."""


class ExportError(BridgeError, RuntimeError):
    """An export failed on some rank. The message names rank and parameter. Every rank of the group raises it."""


class LostRankError(ExportError, CheckpointError):
    """Another rank has ended, or did not come. The message names the rank, if it is known. Start the job again."""


class TargetError(BridgeError, ValueError):
    """A model cannot be sliced for this rank of an engine. Change the ``EngineRank``, or make a new map."""


class TransferError(BridgeError, RuntimeError):
    """Tensors for another process differ from the announced ones, or cannot be shared. Both sides stop reading."""


class BatchError(BridgeError, ValueError):
    """A batch does not fit the model, or its microbatches do not fit the mesh."""


def describe(error: BaseException) -> str:
    """The message of ``error`` for other ranks, with the type of the error unless it is a ``BridgeError``."""
    return str(error) if isinstance(error, BridgeError) else f"{type(error).__name__}: {error}"


def plural(number: int, noun: str) -> str:
    """``1 rank``, ``4 ranks``, ``2 meshes``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "es" if noun.endswith("sh") else "s")


def printable(text: str) -> str:
    r"""``text`` with escapes for all characters that are not printable, except newlines and tabs.

    >>> printable("layers\x1b[2J.0\n")
    'layers\\x1b[2J.0\n'
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode() for char in text
    )


def shown(value: object) -> str:
    """``repr`` of a value for a message, cut in the middle if it has more than ``LONG`` characters.

    For a tensor only dtype, shape and device are shown.
    """
    is_tensor = type(value).__module__.startswith("torch") and hasattr(value, "layout")
    text = f"<{value.dtype} of shape {tuple(value.shape)} on {value.device}>" if is_tensor else repr(value)  # type: ignore[attr-defined]
    if len(text) <= LONG:
        return text
    return f"{text[: LONG // 2]} ... {text[-LONG // 4 :]} ({len(text)} characters)"


def grouped_by_rank(messages: Sequence[str], of: Sequence[int] | None = None) -> str:
    """The messages of a group's ranks in one text. Equal messages are written once, with their ranks.

    Args:
        messages: one message for each rank; "" for a rank without one.
        of: the numbers of these ranks in the job. None: they are numbered in the group.
    """
    ranks: dict[str, list[int]] = {}
    for rank, message in zip(range(len(messages)) if of is None else of, messages, strict=True):
        if message:
            ranks.setdefault(message, []).append(rank)
    parts = []
    for message, senders in ranks.items():
        first = ", ".join(map(str, senders[:FEW])) + (f" and {len(senders) - FEW} more" if len(senders) > FEW else "")
        some = f"ranks {first}" if len(senders) > 1 else f"rank {first}"
        who = f"all {len(messages)} ranks" if of is None and len(senders) == len(messages) > 1 else some
        parts.append(f"{who} of the {'group' if of is None else 'job'}: {message}")
    return "; ".join(parts)
