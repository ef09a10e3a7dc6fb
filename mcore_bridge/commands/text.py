"""Numbers, sizes and lists of names as text for reports."""

from __future__ import annotations

from collections.abc import Sequence

from mcore_bridge.errors import plural as plural

_SHOWN = 5


def num_bytes(value: float) -> str:
    """``153_000_000`` as ``153 MB`` (decimal, three digits)."""
    return _scaled(value, ("B", "kB", "MB", "GB", "TB", "PB"))


def count(value: float) -> str:
    """``76_500_000`` as ``76.5 M``."""
    return _scaled(value, ("", "k", "M", "B", "T")).strip()


def names(given: Sequence[str]) -> str:
    """The first names of tensors, and how many there are beside these."""
    more = f" and {len(given) - _SHOWN:,} more" if len(given) > _SHOWN else ""
    return ", ".join(given[:_SHOWN]) + more


def _scaled(value: float, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        if abs(value) < 999.5:
            return f"{_three_digits(value)} {unit}"
        value /= 1000
    return f"{_three_digits(value)} {units[-1]}"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value == int(value) or abs(value) >= 99.95 else f"{value:.3g}"
