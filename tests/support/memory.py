"""Resident memory and reads of this process, as Linux counts them."""

import ctypes

_M_MMAP_THRESHOLD = -3
"""From malloc.h."""
_libc = ctypes.CDLL(None)
# Set while tests are collected: freed blocks of 64 KiB or more go back to the system. Otherwise the heap keeps tens of
# MB, a different number in every run, which would count as used or hide later use.
_libc.mallopt(_M_MMAP_THRESHOLD, 64 << 10)


def begin() -> int:
    """The bytes that are resident now. The high-water mark is reset."""
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
    """The bytes that the system has read from disks for this process; 0 for files in the page cache."""
    return _number("io", "read_bytes")


def _number(file: str, name: str) -> int:
    with open(f"/proc/self/{file}") as lines:
        fields = dict(line.split(":") for line in lines)
    return int(fields[name].split()[0])
