"""Stacks of experts that a source holds in the other orientation than the rules of its family.

Published files of Qwen3-VL with experts have stacks [experts, in, out], and transformers 5 writes [experts, out, in]
under the same names. It reads both by their shapes, and so do we.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from torch import Tensor

from mcore_bridge.errors import CheckpointError
from mcore_bridge.rules.layout import upright
from mcore_bridge.rules.mapping import pattern_of

if TYPE_CHECKING:
    from mcore_bridge.rules.mapping import WeightMapping

Value = TypeVar("Value")
_Pair: TypeAlias = "dict[bool, tuple[str, Tensor]]"
"""The stacks of a layer with their names, by whether it is the first one."""


def out_major(source: Mapping[str, Value], mapping: WeightMapping) -> frozenset[str]:
    """The names of stacks [experts, out, in] for which the rules say [experts, in, out].

    The two stacks of a layer decide together, since one of them may be square. In [experts, out, in] the
    middle dim of one is twice the last dim of the other.
    """
    stacks = _stacks(mapping)
    layers: dict[str, _Pair] = {}
    for name in source if stacks else ():
        if (is_first := stacks.get(pattern_of(name))) is not None and isinstance(tensor := source[name], Tensor):
            layers.setdefault(name.rpartition(".")[0], {})[is_first] = name, tensor
    return frozenset(name for pair in layers.values() if _is_out_major(pair) for name, _ in pair.values())


def turned(pairs: Iterable[tuple[str, Value]], mapping: WeightMapping) -> Iterator[tuple[str, Value | Tensor]]:
    """The same pairs, with such stacks as the rules say. Each stack waits for the other one of its layer.

    Raises:
        CheckpointError: a stack comes twice.
    """
    stacks = _stacks(mapping)
    layers: dict[str, _Pair] = {}
    for name, tensor in pairs:
        is_first = stacks.get(pattern_of(name)) if stacks and isinstance(tensor, Tensor) else None
        if is_first is None or not isinstance(tensor, Tensor):
            yield name, tensor
            continue
        pair = layers.setdefault(name.rpartition(".")[0], {})
        if is_first in pair:
            raise CheckpointError(f"{name} came twice; every HF tensor must come exactly once")
        pair[is_first] = name, tensor
        if len(pair) == 2:
            is_turned = _is_out_major(layers.pop(name.rpartition(".")[0]))
            yield from ((own, stack.mT if is_turned else stack) for own, stack in pair.values())
    for pair in layers.values():
        yield from pair.values()


def _stacks(mapping: WeightMapping) -> dict[str, bool]:
    """For the name of each kind of stack that the rules transpose, whether it is the first of its layer."""
    return {
        rule.hf[0].removesuffix("[*]"): rule.mcore.endswith("linear_fc1.weight")
        for rule in mapping.rules
        if rule.axis == "etp" and upright(rule.layout) != rule.layout
    }


def _is_out_major(pair: _Pair) -> bool:
    if len(pair) < 2:
        return False
    first, second = pair[True][1].shape, pair[False][1].shape
    return len(first) == len(second) == 3 and first[1] == 2 * second[2] and first[2] == second[1]


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
