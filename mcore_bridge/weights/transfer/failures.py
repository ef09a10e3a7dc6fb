"""What fails on one rank raises on all of them, so that nobody waits for a rank that has left."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mcore_bridge.errors import CheckpointError, describe, grouped_by_rank

if TYPE_CHECKING:
    from mcore_bridge.weights.transfer.collectives import Group


@contextmanager
def raise_on_all(world: Group, what: str) -> Iterator[None]:
    """What fails in here on any rank raises ``what`` on all of them, when all have come to the end."""
    error = ""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as problem:  # torch's CheckpointException is no Exception; the others must hear of it, too
        error = describe(problem)
    if failures := grouped_by_rank(world.all_gather_object(error)):
        raise CheckpointError(f"{what}: {failures}")


def require_alike(world: Group, arguments: Mapping[str, object]) -> None:
    """Raise on all ranks where these arguments of one call are not the same on each.

    Raises:
        CheckpointError: naming the arguments, and what each rank passed.
    """
    asked = world.all_gather_object({name: repr(value) for name, value in arguments.items()})
    if differ := [name for name in arguments if len({each[name] for each in asked}) > 1]:
        passed = grouped_by_rank([", ".join(f"{name}={each[name]}" for name in differ) for each in asked])
        raise CheckpointError(f"expected the same {' and '.join(differ)} on every rank, found {passed}; pass one value")
