"""Every error that we raise on purpose. Each message says what was expected, what was found and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

FEW = 8
"""Ranks that a message names one by one."""
LONG = 160
"""Characters of a value that a message prints whole."""


class BridgeError(Exception):
    """Base of all errors below: catch it to tell our refusals from crashes."""


class ConfigError(BridgeError, ValueError):
    """An HF config, an override or an architecture cannot be expressed exactly. Change the config or the override."""


class MeshError(BridgeError, ValueError):
    """The parallel dimensions cannot be built for this model or world size. Change ``ParallelDims``."""


class MappingError(BridgeError, LookupError):
    """A parameter has no rule, or a tensor no parameter. Fix the architecture's rules, or the model that was built."""


class CheckpointError(BridgeError, RuntimeError):
    """A source of HF tensors is unreadable, incomplete, or holds what the model does not. Fix the source."""


class ExportError(BridgeError, RuntimeError):
    """An export failed on some rank; the message names the rank and the parameter. Every rank of the group raises."""


class LostRankError(ExportError, CheckpointError):
    """Another rank has ended, or did not come; the message says which one, as far as it is known. Start again."""


class TargetError(BridgeError, ValueError):
    """A model cannot be sliced for a rank of such an engine. Change the ``EngineRank``."""


class TransferError(BridgeError, RuntimeError):
    """What is handed to another process is not what was announced, or cannot be shared. Neither side reads on."""


class BatchError(BridgeError, ValueError):
    """A batch does not fit the model, or its microbatches the mesh."""


def describe(error: BaseException) -> str:
    """What others are told of an error: a message of ours says enough, any other has its type before it."""
    return str(error) if isinstance(error, BridgeError) else f"{type(error).__name__}: {error}"


def shown(value: object) -> str:
    """``repr`` of a value for a message, cut in the middle where it has more than ``LONG`` characters."""
    text = repr(value)
    if len(text) <= LONG:
        return text
    return f"{text[: LONG // 2]} ... {text[-LONG // 4 :]} ({len(text)} characters)"


def grouped_by_rank(messages: Sequence[str]) -> str:
    """What the ranks of a group say, each of it once; nothing where it is empty.

    Args:
        messages: of each rank, empty where it has none.
    """
    ranks: dict[str, list[int]] = {}
    for rank, message in enumerate(messages):
        if message:
            ranks.setdefault(message, []).append(rank)
    found = []
    for message, alike in ranks.items():
        first = ", ".join(map(str, alike[:FEW])) + (f" and {len(alike) - FEW} more" if len(alike) > FEW else "")
        some = f"ranks {first}" if len(alike) > 1 else f"rank {first}"
        who = f"all {len(messages)} ranks" if len(alike) == len(messages) > 1 else some
        found.append(f"{who} of the group: {message}")
    return "; ".join(found)
