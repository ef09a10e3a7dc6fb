"""Runs of consecutive items that fit together into a number of bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def runs_within(items: Iterable[Item], size: Callable[[Item], int], limit: int) -> Iterator[list[Item]]:
    """Yield runs of consecutive items with at most ``limit`` bytes together, unless a single item has more.

    >>> list(runs_within([3, 2, 4, 9], int, 5))
    [[3, 2], [4], [9]]
    """
    run: list[Item] = []
    filled = 0
    for item in items:
        own = size(item)
        if run and filled + own > limit:
            yield run
            run, filled = [], 0
        run.append(item)
        filled += own
    if run:
        yield run
