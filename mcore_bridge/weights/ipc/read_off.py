"""Turns the numbers that an engine's tensor holds after probing into copies of slices, whatever their order.

Elements become runs with one step, runs become rows of a rectangle, and so on, as long as fewer are left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mcore_bridge.weights.plan.boxes import BoxCopy

Numbers = np.ndarray[tuple[int], np.dtype[np.int64]]
Steps = tuple[tuple[int, int, int], ...]
"""For each dim: its size, and how far one step of it goes in the source and in the target."""

_SAMPLE = 100_000


@dataclass(frozen=True, slots=True)
class _Runs:
    """Groups of elements. All groups of one ``kind`` have the same shape."""

    source: Numbers
    target: Numbers
    owner: Numbers
    """The HF tensor that the elements of each group belong to."""
    kind: Numbers
    kinds: list[Steps]

    def __len__(self) -> int:
        return len(self.source)

    def sorted_by(self, *keys: Numbers) -> _Runs:
        order = np.lexsort(keys[::-1])
        return _Runs(self.source[order], self.target[order], self.owner[order], self.kind[order], self.kinds)


def read_off(source: Numbers, target: Numbers, owner: Numbers) -> Iterator[tuple[int, BoxCopy]]:
    """Copies of slices that together give all elements, each with its owner. They need not be the fewest possible.

    Args:
        source: the place of each element in its owner.
        target: the place of each element in the engine's tensor, in ascending order.
        owner: the number of the HF tensor that each element belongs to.
    """
    runs = _Runs(source, target, owner, np.zeros(len(source), np.int64), [()])
    while True:
        before = len(runs)
        runs = _joined(runs)
        if len(runs) < before:
            continue
        runs = _joined(runs.sorted_by(runs.owner, runs.source))  # rows that alternate in the target
        runs = runs.sorted_by(runs.target)
        if len(runs) == before:
            break
    for first_source, first_target, number, kind in zip(
        *(column.tolist() for column in (runs.source, runs.target, runs.owner, runs.kind)), strict=True
    ):
        steps = runs.kinds[kind]
        sizes, near, far = zip(*steps, strict=True) if steps else ((), (), ())
        yield number, BoxCopy.of(first_source, sizes, near, first_target, far)


def _joined(runs: _Runs) -> _Runs:
    """Joins neighbours of one owner and kind if they follow each other at the most frequent distance."""
    if len(runs) < 2:
        return runs
    near, far = np.diff(runs.source), np.diff(runs.target)
    alike = (np.diff(runs.owner) == 0) & (np.diff(runs.kind) == 0) & (near >= 0) & (far > 0)
    step = _commonest(near[alike], far[alike])
    if step is None:
        return runs
    goes_on = alike & (near == step[0]) & (far == step[1])
    first = np.flatnonzero(np.concatenate([[True], ~goes_on]))
    sizes = np.diff(np.append(first, len(runs)))
    kinds, kind = _longer(runs.kinds, runs.kind[first], sizes, step)
    return _Runs(runs.source[first], runs.target[first], runs.owner[first], kind, kinds)


def _commonest(near: Numbers, far: Numbers) -> tuple[int, int] | None:
    if not len(near):
        return None
    every = max(1, len(near) // _SAMPLE)
    pairs, counts = np.unique(np.stack([near[::every], far[::every]]), axis=1, return_counts=True)
    best = pairs[:, int(counts.argmax())]
    return int(best[0]), int(best[1])


def _longer(
    kinds: Sequence[Steps], kind: Numbers, sizes: Numbers, step: tuple[int, int]
) -> tuple[list[Steps], Numbers]:
    """The kinds of runs that consist of ``sizes`` shorter runs, ``step`` apart."""
    pairs, places = np.unique(np.stack([kind, sizes]), axis=1, return_inverse=True)
    longer = [kinds[old] if size == 1 else ((size, *step), *kinds[old]) for old, size in pairs.T.tolist()]
    return longer, places.reshape(-1).astype(np.int64)
