"""Limits of a process."""

import resource
from contextlib import contextmanager


@contextmanager
def limited(kind, limit, here):
    """Set the limit of ``kind`` for this process, if it applies ``here``."""
    limits = resource.getrlimit(kind)
    if here:
        resource.setrlimit(kind, (limit, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, limits)
