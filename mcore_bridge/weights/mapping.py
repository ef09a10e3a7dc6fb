"""Rules pair canonical mcore names with HF names through a layout, and a mapping is a total set of rules.

Names hold ``*`` for a layer or expert number. Totality: every mcore parameter has exactly one rule, and every HF name
leads to a rule or to the ignore list; anything else raises with the name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase

from mcore_bridge.errors import MappingError
from mcore_bridge.weights.layout import Layout

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class Rule:
    """One canonical mcore name (pattern), its HF names (patterns, in the order of the layout's parts), the layout.

    ``offset`` is added to the first number on the way to HF names (MTP layers count on after the decoder's).
    ``exported`` is False for a copy whose HF tensor another parameter yields (a tied output layer).
    """

    mcore: str
    hf: tuple[str, ...]
    layout: Layout
    offset: int = 0
    exported: bool = True


@dataclass(frozen=True, slots=True)
class Binding:
    """A rule applied to one canonical name."""

    mcore: str
    hf: tuple[str, ...]
    layout: Layout
    exported: bool


Rules = tuple[Rule, ...]


def table(*rows: tuple[str, str, Layout], exported: bool = True) -> Rules:
    """Rules from rows ``(mcore name, HF names, layout)``, where ``{q,k,v}`` in the HF names lists the parts."""
    return tuple(Rule(mcore, _parts(hf), layout, exported=exported) for mcore, hf, layout in rows)


def under(mcore: str, hf: str, *rules: Rules, offset: int = 0) -> Rules:
    """The rules of a module, placed at ``mcore`` on one side and at ``hf`` on the other."""
    return tuple(
        replace(rule, mcore=f"{mcore}.{rule.mcore}", hf=tuple(f"{hf}.{name}" for name in rule.hf), offset=offset)
        for group in rules
        for rule in group
    )


def _parts(pattern: str) -> tuple[str, ...]:
    before, brace, rest = pattern.partition("{")
    inside, _, after = rest.partition("}")
    return tuple(f"{before}{part}{after}" for part in inside.split(",")) if brace else (pattern,)


@dataclass(frozen=True)
class WeightMapping:
    """All rules of a model, and (``fnmatch`` patterns) the HF names that may stay unused, or be missing in a source."""

    rules: Rules
    ignored: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    _by_mcore: dict[str, Rule] = field(init=False, repr=False, compare=False)
    _by_hf: dict[str, list[Rule]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_mcore: dict[str, Rule] = {}
        by_hf: dict[str, list[Rule]] = {}
        for rule in self.rules:
            if rule.mcore in by_mcore:
                raise MappingError(f"two rules for {rule.mcore}: {by_mcore[rule.mcore].hf} and {rule.hf}; keep one")
            by_mcore[rule.mcore] = rule
            for name in rule.hf:
                by_hf.setdefault(name, []).append(rule)
        object.__setattr__(self, "_by_mcore", by_mcore)
        object.__setattr__(self, "_by_hf", by_hf)

    def bind(self, mcore: str) -> Binding:
        """The binding of a canonical name.

        Raises:
            MappingError: when no rule has this name.
        """
        pattern = _NUMBER.sub("*", mcore)
        rule = self._by_mcore.get(pattern)
        if rule is None:
            near = get_close_matches(pattern, self._by_mcore, n=3)
            raise MappingError(
                f"no rule for the mcore parameter {mcore}; the nearest rules are {near}. Add a rule for it to the "
                "architecture, or build the model without it"
            )
        numbers = _NUMBER.findall(mcore)
        return Binding(mcore, tuple(_fill(name, numbers, rule.offset) for name in rule.hf), rule.layout, rule.exported)

    def consumers(self, hf: str) -> tuple[str, ...]:
        """The canonical names of all parameters that an HF tensor goes into, whether or not a model has them."""
        numbers = _NUMBER.findall(hf)
        found = (
            _fill(rule.mcore, numbers, -rule.offset)
            for rule in self._by_hf.get(_NUMBER.sub("*", hf), ())
            if not rule.offset or int(numbers[0]) >= rule.offset
        )
        return tuple(found)

    def is_ignored(self, hf: str) -> bool:
        """Whether the architecture allows this HF tensor to stay unused."""
        return matches(hf, self.ignored)

    def is_optional(self, hf: str) -> bool:
        """Whether a source may lack this HF tensor, so that what the constructor put there stays."""
        return matches(hf, self.optional)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether ``name`` matches one of the ``fnmatch`` patterns, case counting."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _fill(pattern: str, numbers: list[str], offset: int) -> str:
    values = [str(int(numbers[0]) + offset), *numbers[1:]] if numbers else []
    head, *tails = pattern.split("*")
    return head + "".join(value + tail for value, tail in zip(values, tails, strict=True))
