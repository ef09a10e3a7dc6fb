"""Which processes can see each other, and which of them are alive, as Linux says it under ``/proc``."""

from __future__ import annotations

import os
from pathlib import Path


def this_machine() -> str:
    """Equal for processes that see each other by number: this start of the machine, and the pid namespace.

    Empty where the system does not say it.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def start_time(pid: int) -> str:
    """When a process of this machine started, in ticks since boot; empty if it has ended, waited for or not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def is_alive(pid: int, started: str) -> bool:
    """Whether the process of this number still runs that ``start_time`` once said to have ``started`` then."""
    return start_time(pid) == started
