"""Makes one rank fail."""

import os
import pkgutil
import signal
from typing import Any
from unittest import mock

import torch.distributed as dist


def only_on_1(name, after=0):
    """The function with this dotted name raises once on rank 1, after this number of calls."""
    calls, real = iter(range(1 << 30)), pkgutil.resolve_name(name)

    def failing(*arguments, **named):
        if dist.get_rank() == 1 and next(calls) == after:
            raise RuntimeError("out of memory")
        return real(*arguments, **named)

    return mock.patch(name, failing)


def wait_for_all(rank_that_leaves: int, report: Any) -> int:
    """Runs on each rank: one of them raises or, with a negative number, is killed. It is here since new processes
    import this module sooner than a test.
    """
    rank = dist.get_rank()
    report("work", 1, 2)
    if rank == abs(rank_that_leaves):
        if rank_that_leaves < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyError("planted")
    dist.barrier()
    return rank
