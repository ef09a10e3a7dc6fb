"""Raises on all ranks if one rank fails, so that no rank waits for a rank that has left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mcore_bridge.config.mesh.alike import Shared, agreed
from mcore_bridge.errors import BridgeError, CheckpointError, ExportError, describe, grouped_by_rank

if TYPE_CHECKING:
    from mcore_bridge.weights.transfer.collectives import Group


@contextmanager
def raise_on_all(group: Group, what: str = "", kind: type[BridgeError] = CheckpointError) -> Iterator[None]:
    """Run the block on all ranks of ``group``, and then raise on all of them if it failed on any.

    Args:
        what: the beginning of the message, which explains the failure.
        kind: the error to raise.
    """
    problem = ""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception; other ranks need it, too
        problem = describe(error)
    require_all(group, problem, what, kind)


def require_all(group: Group, problem: str, what: str = "", kind: type[BridgeError] = ExportError) -> None:
    """Raise ``kind`` on every rank if any rank has a ``problem``. Without one, this is one small collective."""
    if not group.all_true(not problem):
        raise_failures(group.all_gather_object(problem), what, kind)


def any_of_ranks(group: Group, problem: str, flags: Sequence[bool]) -> list[int]:
    """Which of ``flags`` any rank has. Raise ``ExportError`` on every rank if any has a ``problem``.

    Without one, this is one small collective.
    """
    some_failed, *of_ranks = group.most([bool(problem), *flags])
    if some_failed:
        raise_failures(group.all_gather_object(problem))
    return of_ranks


def raise_failures(problems: Sequence[str], what: str = "", kind: type[BridgeError] = ExportError) -> None:
    """Raise ``kind`` if any rank has a problem. This rank already has the ``problems`` of all ranks."""
    if failures := grouped_by_rank(problems):
        raise kind(f"{what}: {failures}" if what else failures)


def require_alike(group: Group, arguments: Shared) -> None:
    """Raise ``CheckpointError`` on all ranks if these arguments differ between ranks, with what each rank passed."""
    agreed([group.group], lambda: (None, arguments), CheckpointError)  # type: ignore[list-item]  # there is a world
