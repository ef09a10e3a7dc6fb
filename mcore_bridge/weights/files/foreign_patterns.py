"""Regular expressions from files of unknown origin, with a time limit.

``re`` decides whether a pattern is valid. The package ``regex`` runs it, since it supports a time limit. The two
packages agree on all patterns, except for patterns that are refused here. Elsewhere we only accept ``fnmatch``
patterns, whose time grows only with the lengths of pattern and name.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from math import prod

import regex

from mcore_bridge.errors import CheckpointError, shown

SECONDS = 5.0
"""Time for all comparisons of one file. A good pattern needs a few microseconds for a name."""
_LENGTH = 10_000
_REPEATS = 10_000
"""The largest product of the counts in a pattern, since ``regex`` expands repetitions."""
_COUNT = re.compile(r"\{(\d*),?(\d*)\}")
_ONLY_REGEX = re.compile(r"(?<!\\)\{(?!\d+(?:,\d*)?\}|,\d+\})|\[:")
"""Syntax for fuzzy matching and for POSIX classes, which ``re`` reads as plain characters, but ``regex`` does not."""


def problem_of(pattern: str) -> str:
    """The reason why a pattern is refused, or an empty string."""
    if len(pattern) > _LENGTH:
        return f"it has more than {_LENGTH} characters"
    try:
        re.compile(pattern)
        counts = [max(int(count or 1) for count in match) for match in _COUNT.findall(pattern)]
        if prod(counts) > _REPEATS:
            return f"it repeats more than {_REPEATS} times"
        if _ONLY_REGEX.search(pattern):
            return "it has braces without a count, or [:"
        regex.compile(pattern)
    except (re.error, regex.error, RecursionError, OverflowError, ValueError) as error:
        return f"it is no regular expression: {error}"
    return ""


@dataclass(slots=True)
class Comparisons:
    """Compares names with the patterns of one file, for a limited time in all."""

    seconds: float = field(default_factory=lambda: SECONDS)

    def fullmatch(self, pattern: str, name: str) -> bool:
        """Whether a pattern matches the whole of a name, as by ``re.fullmatch``.

        Args:
            pattern: a pattern without a ``problem_of``.
            name: the name of a module or a tensor.

        Raises:
            CheckpointError: the comparisons of this file take too long.
        """
        start, matches = time.process_time(), False
        try:
            matches = regex.fullmatch(pattern, name, timeout=max(self.seconds, 1e-3)) is not None
        except TimeoutError:
            self.seconds = 0.0
        self.seconds -= time.process_time() - start
        if self.seconds <= 0:
            raise CheckpointError(
                f"patterns must be compared with all names in {SECONDS:g} seconds, but {shown(pattern)} takes "
                f"longer for {shown(name)}: write a simpler one, or list the names of modules"
            )
        return matches
