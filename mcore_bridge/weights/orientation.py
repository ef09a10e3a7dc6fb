"""Stacks of experts that a source holds in the other orientation than the rules of its family.

Published files of Qwen3-VL with experts have stacks [experts, in, out], and transformers 5 writes [experts, out, in]
under the same names. It reads both by their shapes, and so do we.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

from mcore_bridge.rules.layout import TRANSPOSED, Chain
from mcore_bridge.rules.mapping import pattern_of

if TYPE_CHECKING:
    from mcore_bridge.rules.mapping import WeightMapping

Value = TypeVar("Value")


def out_major(source: Mapping[str, Value], mapping: WeightMapping) -> frozenset[str]:
    """The names of stacks [experts, out, in] for which the rules say [experts, in, out].

    The two stacks of a layer decide together, since one of them may be square. In [experts, out, in] the
    middle dim of one is twice the last dim of the other.
    """
    stacks = {
        rule.hf[0].removesuffix("[*]"): rule.mcore.endswith("linear_fc1.weight")
        for rule in mapping.rules
        if rule.axis == "etp" and isinstance(rule.layout, Chain) and rule.layout.steps[0] == TRANSPOSED
    }
    layers: dict[str, dict[bool, str]] = {}
    for name in source if stacks else ():
        if (pattern := pattern_of(name)) in stacks and isinstance(source[name], Tensor):
            layers.setdefault(name.rpartition(".")[0], {})[stacks[pattern]] = name
    return frozenset(name for pair in layers.values() if _is_out_major(source, pair) for name in pair.values())


def _is_out_major(source: Mapping[str, Value], pair: Mapping[bool, str]) -> bool:
    if len(pair) < 2:
        return False
    first, second = source[pair[True]], source[pair[False]]
    if not isinstance(first, Tensor) or not isinstance(second, Tensor) or not first.dim() == second.dim() == 3:
        return False
    return first.shape[1] == 2 * second.shape[2] and first.shape[2] == second.shape[1]


class Turned(Mapping[str, Value]):
    """A mapping of which some tensors have their last two dims swapped."""

    def __init__(self, source: Mapping[str, Value], names: frozenset[str]) -> None:
        self._source, self._names = source, names

    def __getitem__(self, name: str) -> Value:
        value = self._source[name]
        return value.mT if name in self._names else value  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[str]:
        return iter(self._source)

    def __len__(self) -> int:
        return len(self._source)
