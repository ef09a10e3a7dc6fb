"""``layout="balanced"``: the explicit pipeline layout whose fullest rank holds the fewest bytes.

A layout is a tuple of cuts: stage ``i`` holds layers ``cuts[i]`` up to ``cuts[i + 1]``, and belongs to rank ``i % pp``.
Layouts are compared by the loads of the ranks, sorted from the fullest, and then by how even the chunks are. The
result is optimal in three cases:

* ``vp == 1``: a dynamic program cuts each window exactly, and there is only one window;
* all layers are equal: a rank above the optimum can always give a layer to one below it;
* there are few cuts: all of them are tried.

In general the problem contains number partitioning, which is hard. Then the result is a local optimum: moving one
layer, or cutting one window anew, does not improve it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations, combinations_with_replacement, pairwise
from math import comb
from typing import TYPE_CHECKING

import numpy as np

from mcore_bridge.config.mesh.pipeline import BALANCED
from mcore_bridge.errors import MeshError

if TYPE_CHECKING:
    from mcore_bridge.config.mesh.parallel_dims import ParallelDims

Cuts = tuple[int, ...]
_FEW = 20_000  # up to this number, all cuts are tried; this takes about 0.2 s


def balanced(dims: ParallelDims, *, layer_bytes: Sequence[int], embedding_bytes: int, loss_bytes: int) -> ParallelDims:
    """``dims`` with the explicit layout that minimises the bytes of the fullest pipeline rank, over all its chunks.

    Layers stay in order and every stage gets at least one, unless there are more stages than layers.

    Args:
        dims: its layout is "balanced" or None, and it has no other split of the pipeline.
        layer_bytes: bytes of each decoder layer, in order.
        embedding_bytes: bytes of the modules before the first layer.
        loss_bytes: bytes of the modules after the last layer (final norm, output layer).

    Raises:
        MeshError: ``dims`` already have a split of the pipeline, there are no layers, or bytes are negative.
    """
    if dims.layout not in (None, BALANCED):
        raise MeshError(
            f'layout must be "balanced" or None to be chosen by bytes, found {dims.layout!r}: leave the layout out'
        )
    if not layer_bytes or min(*layer_bytes, embedding_bytes, loss_bytes) < 0:
        raise MeshError(
            "there must be at least one layer, and no negative bytes, found "
            f"layer_bytes={list(layer_bytes)}, embedding_bytes={embedding_bytes}, loss_bytes={loss_bytes}"
        )
    if dims.pp == 1:
        return replace(dims, layout=None)
    extra = [0] * dims.pp
    extra[0] += embedding_bytes
    extra[-1] += loss_bytes
    task = _Task(dims.pp, dims.pp * dims.vp, (0, *accumulate(layer_bytes)), tuple(extra))
    stages = ["t" * (end - start) for start, end in pairwise(_best(task))]
    return replace(dims, layout="E" + "|".join(stages) + "L")


@dataclass(frozen=True, slots=True)
class _Task:
    """``bytes_before[i]``: bytes of all layers before layer ``i``; ``extra``: bytes of each rank besides layers."""

    pp: int
    num_stages: int
    bytes_before: tuple[int, ...]
    extra: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        return len(self.bytes_before) - 1

    @property
    def fewest(self) -> int:
        """The least number of layers of a stage."""
        return int(self.num_layers >= self.num_stages)

    def chunks(self, cuts: Cuts) -> list[int]:
        return [self.bytes_before[end] - self.bytes_before[start] for start, end in pairwise(cuts)]

    def loads(self, cuts: Cuts) -> list[int]:
        chunks = self.chunks(cuts)
        return [sum(chunks[rank :: self.pp]) + self.extra[rank] for rank in range(self.pp)]

    def cost(self, cuts: Cuts) -> tuple[list[int], int]:
        return sorted(self.loads(cuts), reverse=True), sum(chunk * chunk for chunk in self.chunks(cuts))


def _best(task: _Task) -> Cuts:
    num_free = task.num_layers - 1 if task.fewest else task.num_layers + task.num_stages - 1
    if comb(num_free, task.num_stages - 1) <= _FEW:
        return _least(task, [*_every(task)])
    cuts = tuple(i * task.num_layers // task.num_stages for i in range(task.num_stages + 1))
    while (
        better := _better(task, cuts, _transfers(task, cuts)) or _better(task, cuts, _recuts(task, cuts))
    ) is not None:
        cuts = better
    return cuts


def _every(task: _Task) -> Iterator[Cuts]:
    inner = (
        combinations(range(1, task.num_layers), task.num_stages - 1)
        if task.fewest
        else combinations_with_replacement(range(task.num_layers + 1), task.num_stages - 1)
    )
    return ((0, *cuts, task.num_layers) for cuts in inner)


def _better(task: _Task, cuts: Cuts, candidates: Iterable[Cuts]) -> Cuts | None:
    best = _least(task, [cuts, *candidates])
    return best if task.cost(best) < task.cost(cuts) else None


def _least(task: _Task, candidates: Sequence[Cuts]) -> Cuts:
    """The first of the candidates with the least cost."""
    chunks = np.diff(np.array(task.bytes_before)[np.array(candidates)])
    loads = np.sort(chunks.reshape(len(candidates), -1, task.pp).sum(1) + np.array(task.extra))[:, ::-1]
    least = loads[np.lexsort(loads.T[::-1])[0]]
    return min((candidates[number] for number in np.flatnonzero((loads == least).all(1)).tolist()), key=task.cost)


def _transfers(task: _Task, cuts: Cuts) -> Iterator[Cuts]:
    """Yield cuts in which a stage of a fullest rank gives one layer to another stage; stages between shift by one."""
    loads = task.loads(cuts)
    for giver in range(task.num_stages):
        if loads[giver % task.pp] < max(loads) or cuts[giver + 1] - cuts[giver] <= task.fewest:
            continue
        for taker in range(task.num_stages):
            low, high, step = (giver, taker, -1) if giver < taker else (taker, giver, 1)
            yield tuple(cut + step if low < i <= high else cut for i, cut in enumerate(cuts))


def _recuts(task: _Task, cuts: Cuts) -> Iterator[Cuts]:
    """Yield cuts in which one window of ``pp`` stages in a row is cut again, so that its fullest rank is least full."""
    loads, chunks = task.loads(cuts), task.chunks(cuts)
    for first in range(task.num_stages - task.pp + 1):
        window = range(first, first + task.pp)
        others = [loads[i % task.pp] - chunks[i] for i in window]
        inner = _recut(task, cuts[first], cuts[first + task.pp], others, limit=max(loads))
        yield (*cuts[:first], *inner, *cuts[first + task.pp + 1 :])


def _recut(task: _Task, start: int, end: int, others: Sequence[int], *, limit: int) -> Cuts:
    """Cuts layers ``start`` to ``end`` into ``len(others)`` stages; minimises the largest ``chunk + other``."""
    reached: dict[int, tuple[int, Cuts]] = {start: (0, (start,))}
    for num_left, other in zip(reversed(range(len(others))), others, strict=True):
        best: dict[int, tuple[int, Cuts]] = {}
        for cut, (fullest, path) in reached.items():
            for to in range(cut + task.fewest, end - num_left * task.fewest + 1):
                load = max(fullest, other + task.bytes_before[to] - task.bytes_before[cut])
                if load > limit:
                    break
                if to not in best or load < best[to][0]:
                    best[to] = load, (*path, to)
        reached = best
    return reached[end][1]
