"""Resident memory and reads of this process, as Linux counts them."""

import ctypes

_M_MMAP_THRESHOLD = -3
"""From malloc.h."""
_libc = ctypes.CDLL(None)
# As soon as tests are collected: blocks of 64 KiB or more, freed, go back to the system. What a heap keeps for later
# would count as used or hide what is, tens of MB, and differently in every run.
_libc.mallopt(_M_MMAP_THRESHOLD, 64 << 10)


def begin() -> int:
    """Bytes resident now; the high-water mark starts anew."""
    _libc.malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return resident()


def resident() -> int:
    """Bytes resident now."""
    return 1024 * _number("status", "VmRSS")


def peak() -> int:
    """The most bytes that were resident since ``begin``."""
    return 1024 * _number("status", "VmHWM")


def read_from_disk() -> int:
    """Bytes that this process has made the system read from disks; 0 for files that are in memory."""
    return _number("io", "read_bytes")


def _number(file: str, name: str) -> int:
    with open(f"/proc/self/{file}") as lines:
        fields = dict(line.split(":") for line in lines)
    return int(fields[name].split()[0])
