"""Work that tests share: a job of the pool has many cases of a mesh, and a session computes a tensor once."""

import os
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mcore_bridge as mb
from tests.support import pool

TOGETHER = 20 if "PYTEST_XDIST_WORKER" in os.environ else 1
"""The number of cases in one job of the pool. Making the groups of a mesh takes longer than a case."""


def results(
    function: Callable[..., Any],
    arguments: Callable[[str, mb.ParallelDims], tuple[Any, ...]],
    dims: mb.ParallelDims,
    name: str,
    names: Sequence[str],
) -> Sequence[Any]:
    """What each rank of a mesh returns for the case ``name``. Its neighbours in ``names`` run in the same job.

    If one of them raises, each case runs alone, so that only this case fails.

    Args:
        function: runs in each worker; it makes the groups of the mesh by ``stepping.meet``.
        arguments: makes the arguments of ``function`` for a case.
    """
    first = names.index(name) // TOGETHER * TOGETHER
    together = _results(function, arguments, dims, tuple(names[first : first + TOGETHER]))
    return together.get(name) or _results(function, arguments, dims, (name,))[name]


@cache
def _results(function: Any, arguments: Any, dims: mb.ParallelDims, names: tuple[str, ...]) -> dict[str, Sequence[Any]]:
    """The results of all ranks, by name. They are empty if one of several cases raised."""
    try:
        ranks = pool.run(dims.smallest_world, of_all, function, [arguments(name, dims) for name in names])
    except Exception:
        if len(names) == 1:
            raise
        return {}
    return dict(zip(names, zip(*ranks, strict=True), strict=True))


def of_all(function: Callable[..., Any], cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Runs in each worker: the result of each case."""
    return [function(*case) for case in cases]


def once(key: str, compute: Callable[[], Tensor]) -> Tensor:
    """A tensor that all processes of a session share: the first that needs it computes it."""
    session = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if session is None:
        return compute()
    path = Path(os.environ["MCORE_BRIDGE_CACHE"]) / f"{session}-{sha256(key.encode()).hexdigest()}.pt"
    if not path.exists():
        unfinished = path.with_suffix(f".{os.getpid()}")
        torch.save(compute(), unfinished)
        unfinished.replace(path)
    found: Tensor = torch.load(path)
    return found
