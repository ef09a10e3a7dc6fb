"""Progress of long calls. Whoever wants to see it opens ``show_progress`` around them, so no call has an argument."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

from mcore_bridge.arguments import FUNCTION, require
from mcore_bridge.errors import BridgeError

T = TypeVar("T")
Report = Callable[[str, int, int], object]
"""A function that gets a phase, how many of its tensors are done, and how many there are (0 if nobody knows)."""

_REPORT: ContextVar[Report | None] = ContextVar("mcore_bridge_progress", default=None)


@contextmanager
def show_progress(on_event: Report | None = None) -> Iterator[None]:
    """Show the progress of loads and exports inside of the ``with`` block, also within ``build_model`` and saves.

    Args:
        on_event: called on this rank after each tensor. It gets the phase ("load" or "export"), the number of tensors
            that are done, and the number of all, which is 0 for a source of pairs. None: a bar on stderr, on rank 0
            alone.

    Raises:
        BridgeError: ``on_event`` is no function.

    Example:
        >>> events = []
        >>> with mb.show_progress(lambda phase, done, total: events.append((phase, done, total))):
        ...     report = mb.load_hf_weights(models, "path/of/Qwen3-8B")
        >>> events[0], events[-1]
        (('load', 1, 47), ('load', 47, 47))
    """
    require(BridgeError, on_event=(on_event, FUNCTION.or_none()))
    bars: dict[str, Any] = {}
    is_first = os.environ.get("RANK", "0") == "0"
    before = _REPORT.set(on_event or (lambda *event: _draw(bars, *event) if is_first else None))
    try:
        yield
    finally:
        _REPORT.reset(before)
        for bar in bars.values():
            bar.close()


def tracked(items: Iterable[T], phase: str, count: Callable[[], int]) -> Iterator[T]:
    """Yield the items, and report each to the function of ``show_progress`` when the consumer is done with it.

    Args:
        count: counts the items, if somebody wants to know.
    """
    report = _REPORT.get()
    return iter(items) if report is None else _reported(items, partial(report, phase), count())


def _reported(items: Iterable[T], report: Callable[[int, int], object], total: int) -> Iterator[T]:
    for number, item in enumerate(items, start=1):
        yield item
        report(number, total)


def _draw(bars: dict[str, Any], phase: str, done: int, total: int) -> None:
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    if phase not in bars:
        bars[phase] = tqdm(desc=phase, total=total or None, unit=" tensors")
    bars[phase].update(done - bars[phase].n)
    if done == total:
        bars.pop(phase).close()
