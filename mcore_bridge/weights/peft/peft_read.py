"""Reads the config of a PEFT folder: ranks, scales and targets. Settings that are not supported raise by name.

The config may have regular expressions, and the file may come from anybody. So no pattern may keep a process busy.
``re`` decides whether a pattern is valid, and the package ``regex`` runs it, since it stops after a time. Patterns for
which the two differ are refused. The other patterns are in the form of ``fnmatch``, whose time grows only with the
lengths of pattern and name.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import regex

from mcore_bridge.arguments import is_count
from mcore_bridge.config.fields import is_dropout, is_number
from mcore_bridge.errors import CheckpointError, shown
from mcore_bridge.weights.peft.peft_config import STACKS

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


_READ = frozenset(
    {
        *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora"),
        *("target_modules", "target_parameters", "exclude_modules", "lora_dropout", "use_dora"),
        *("layers_to_transform", "layers_pattern"),
    }
)
_WITHOUT_EFFECT = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "megatron_core"),
        *("peft_version", "qalora_group_size", "revision", "task_type", "eva_config", "runtime_config"),
    }
)
"""Fields that describe the origin of an adapter, or that only matter together with a refused field."""
# fmt: off
_REFUSED = {
    "bias":                  "biases of the base are trained",
    "lora_bias":             "the adapters have biases",
    "modules_to_save":       "whole modules are trained, which are no adapters",
    "fan_in_fan_out":        "weights are [in, out]",
    "layer_replication":     "layers are used more than once",
    "trainable_token_indices": "rows of the embedding are trained",
}
# fmt: on
_LAYER = r"(?:^|.*?\.)(?:{})\.(?P<number>\d+)\."
"""The first of some lists of modules in a name, and the number in it, as ``peft`` finds the number of a layer."""
_CHANGES_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """Ranks, scales, targets, dropout and DoRA of an adapter, as its config has them."""

    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_modules: str | frozenset[str]
    target_parameters: frozenset[str]
    exclude_modules: str | frozenset[str]
    dropout: float = 0.0
    dora: bool = False
    layers: frozenset[int] | None = None
    layer_lists: frozenset[str] = frozenset()
    comparisons: Comparisons = field(default_factory=Comparisons, compare=False)

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> PeftConfig:
        """The config from fields that ``unreadable_in`` has accepted."""
        layers, lists = fields.get("layers_to_transform"), fields.get("layers_pattern")
        return cls(
            fields["r"],
            fields["lora_alpha"],
            bool(fields.get("use_rslora")),
            fields.get("rank_pattern") or {},
            fields.get("alpha_pattern") or {},
            _names(fields.get("target_modules")),
            frozenset(fields.get("target_parameters") or ()),
            _names(fields.get("exclude_modules")),
            fields.get("lora_dropout") or 0.0,
            bool(fields.get("use_dora")),
            None if layers in (None, []) else frozenset(layers if isinstance(layers, list) else [layers]),
            frozenset([lists] if isinstance(lists, str) and lists else lists or ()),
        )

    @property
    def stacks(self) -> tuple[str, ...]:
        """The names in ``STACKS`` with adapters."""
        return tuple(name for name in STACKS if any(_ends(target, name) for target in self.target_parameters))

    def rank_of(self, module: str) -> int:
        """The rank of the adapter of a module, or of a parameter, by its HF name."""
        return int(self._by_pattern(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        """The scale by which the product of its factors is multiplied."""
        rank = self.rank_of(module)
        alpha = float(self._by_pattern(self.alpha_pattern, module, self.alpha))
        return alpha / rank**0.5 if self.use_rslora else alpha / rank

    def lists(self, module: str) -> bool:
        """Whether a module is a target in a list of targets."""
        is_list = not isinstance(self.target_modules, str)
        return is_list and self._lists(module) and not self._excludes(module)

    def has(self, module: str) -> bool:
        """Whether a module, or a parameter, is a target."""
        if self._excludes(module):
            return False
        return (
            (isinstance(self.target_modules, str) and self.target_modules.lower() == "all-linear")
            or self._lists(module)
            or self._selects(self.target_parameters, module)
        )

    def _lists(self, module: str) -> bool:
        """Whether ``target_modules`` selects a module in one of the layers with adapters."""
        if self.layers is not None and module not in self.target_modules:  # a list may have the whole name
            layer = re.match(_LAYER.format("|".join(self.layer_lists) or r"[^.]*"), module)
            if layer is None or int(layer["number"]) not in self.layers:
                return False
        return self._selects(self.target_modules, module)

    def _excludes(self, module: str) -> bool:
        return self._selects(self.exclude_modules, module)

    def _selects(self, names: str | frozenset[str], module: str) -> bool:
        """Whether ``peft`` would select a module: by one regular expression for the whole name, or by ends of names."""
        if isinstance(names, str):
            return self.comparisons.fullmatch(names, module)
        words = module.split(".")
        return any(".".join(words[first:]) in names for first in range(len(words)))  # a list may have all modules

    def _by_pattern(self, values: Mapping[str, Any], module: str, otherwise: float) -> float:
        """The value for a module: like ``peft``, the value of the first pattern that matches the end of its name."""
        matching = (value for key, value in values.items() if self.comparisons.fullmatch(rf"(.*\.)?({key})$", module))
        return next(matching, otherwise)


def unreadable_in(fields: Mapping[str, Any]) -> Iterator[str]:
    """Yield the fields whose value is invalid in any adapter."""
    if fields.get("peft_type") != "LORA":
        yield f"peft_type must be 'LORA', found {fields.get('peft_type')!r}"
        return
    for name, (is_good, expected) in _CHECKS.items():
        if not is_good(value := fields.get(name)):
            why = next(filter(None, map(problem_of, _patterns_in(value))), "")
            yield f"{name} must be {expected}, found {shown(value)}" + (f", and {why}" if why else "")


def refused_in(fields: Mapping[str, Any]) -> Iterator[str]:
    """Yield all reasons why an adapter with this config is not supported."""
    init = fields.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_CHANGES_BASE):
        yield f"init_lora_weights={init!r} has changed the base: convert the adapter as peft's documentation says"
    for name, value in fields.items():
        if name in _READ | _WITHOUT_EFFECT | {"peft_type", "init_lora_weights"} or not value or value == "none":
            continue
        yield f"{name}={shown(value)}: {_REFUSED.get(name, 'this field is not supported')}"


def _is_list(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(name, str) for name in value))


def _is_pattern(value: Any) -> bool:
    """Whether a value is one regular expression, and not a list of ends of names."""
    if not isinstance(value, str):
        return _is_list(value)
    return not problem_of(value)


def _patterns_in(value: Any) -> Iterator[str]:
    """The regular expressions in the value of a field, in which lists have names instead."""
    yield from [value] if isinstance(value, str) else value if isinstance(value, dict) else ()


def _are_stacks(value: Any) -> bool:
    return _is_list(value) and all(any(_ends(name, stack) for stack in STACKS) for name in value or ())


def _are_layers(value: Any) -> bool:
    return value is None or all(map(_is_layer, value if isinstance(value, list) else [value]))


def _is_layer(value: Any) -> bool:
    return value == 0 or is_count(value)


_NAMES = "a list of names, or a regular expression"
_CHECKS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "r": (is_count, "an int of at least 1"),
    "lora_alpha": (is_number, "a finite number"),
    "lora_dropout": (lambda value: value is None or is_dropout(value), "from 0 up to, but not including, 1"),
    "rank_pattern": (
        lambda value: not value or (isinstance(value, dict) and _all(value, is_count)),
        "ranks of at least 1 by regular expressions",
    ),
    "alpha_pattern": (
        lambda value: not value or (isinstance(value, dict) and _all(value, is_number)),
        "finite numbers by regular expressions",
    ),
    "target_modules": (_is_pattern, _NAMES),
    "exclude_modules": (_is_pattern, _NAMES),
    "target_parameters": (_are_stacks, f"a list of experts in one tensor, whose names end in one of {[*STACKS]}"),
    "layers_to_transform": (_are_layers, "the number of a layer, or a list of numbers"),
    "layers_pattern": (lambda value: isinstance(value, str) or _is_list(value), "the name of a list of layers"),
}
"""For each field, whether a value is good, and what was expected."""


def _all(patterns: Mapping[str, Any], is_good: Any) -> bool:
    return all(not problem_of(pattern) and is_good(value) for pattern, value in patterns.items())


def _names(value: Any) -> str | frozenset[str]:
    return value if isinstance(value, str) else frozenset(value or ())


def _ends(name: str, end: str) -> bool:
    return f".{name}".endswith(f".{end}")
