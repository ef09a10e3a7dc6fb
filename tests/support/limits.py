"""Limits of a process."""

import resource
from contextlib import contextmanager


@contextmanager
def limited(kind, limit, here):
    """What this process may have of ``kind`` is ``limit``, if that is meant ``here``."""
    limits = resource.getrlimit(kind)
    if here:
        resource.setrlimit(kind, (limit, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, limits)
