"""Makes one rank fail."""

import pkgutil
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
