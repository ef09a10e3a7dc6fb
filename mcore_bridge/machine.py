"""The processes and the memory of this machine, read from Linux's ``/proc``. Also pauses garbage collection."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def this_machine() -> str:
    """An identity that is equal for processes with one boot and one pid namespace, which see each other's ids.

    It is empty if the system does not provide it.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def start_time(pid: int) -> str:
    """The start time of a process of this machine, in ticks since boot; empty if the process has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def is_alive(pid: int, started: str) -> bool:
    """Whether the process ``pid`` still runs. ``started`` is an earlier result of ``start_time`` for it."""
    return start_time(pid) == started


def free_memory() -> int:
    """The bytes of memory that new objects may take without swapping."""
    import psutil

    return int(psutil.virtual_memory().available)


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause the garbage collector in the block, if it is on.

    It takes a third of the time if very many objects are made and kept.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
