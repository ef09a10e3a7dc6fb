"""What a receiver gets of an export, and which rows of it become which part of which HF tensor."""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from mcore_bridge.rules.fused_loads import fused_module
from mcore_bridge.rules.mapping import unstacked
from mcore_bridge.rules.names import expert_of
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.plan.inventory import ParamEntry


@dataclass(frozen=True, slots=True)
class OutputTensor(TensorSpec):
    """An HF tensor, and the further names under which it is written."""

    copies: tuple[str, ...] = ()


class RowRange(NamedTuple):
    """Rows of what travels of a shard that become a part of one output."""

    output: int
    first: int
    end: int


@dataclass(frozen=True)
class Payload:
    """What a receiver gets, in order; entries and outputs go by their places."""

    entries: tuple[ParamEntry, ...]
    outputs: tuple[OutputTensor, ...]
    places: tuple[tuple[tuple[int, int], ...], ...]
    """For each part of each entry, its output and the byte at which it begins there."""
    _stretches: dict[tuple[int, int], tuple[RowRange, ...]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, entries: Sequence[ParamEntry]) -> Payload:
        """What becomes of ``entries``. Several may make up one output."""
        outputs: list[OutputTensor] = []
        numbers: dict[str, int] = {}
        places = []
        for entry in entries:
            found = []
            for index, (hf, shape) in enumerate(zip(entry.hf, entry.trace.part_shapes, strict=True)):
                name, number = unstacked(hf)
                if name not in numbers:
                    numbers[name] = len(outputs)
                    whole = shape if number is None else (entry.stack, *shape)
                    outputs.append(OutputTensor(name, whole, entry.held.dtype, entry.copies if index == 0 else ()))
                found.append((numbers[name], (number or 0) * math.prod(shape) * entry.held.dtype.itemsize))
            places.append(tuple(found))
        return cls(tuple(entries), tuple(outputs), tuple(places))

    def row_ranges(self, number: int, shard: int) -> tuple[RowRange, ...]:
        """What becomes of a shard of an entry; found once, as many ranks send a part each, and plans are tried."""
        if (number, shard) not in self._stretches:
            entry = self.entries[number]
            outputs = [output for output, _ in self.places[number]]
            if len(outputs) == 1:
                found = [RowRange(outputs[0], 0, entry.sent[0])]
            else:
                copies = entry.copies_of(shard)
                rows = [(c.part, *((at, c.size) if c.dim == 0 else (0, entry.sent[0]))) for c, at in copies]
                found = [RowRange(outputs[part], first, first + size) for part, first, size in rows]
            self._stretches[number, shard] = tuple(found)
        return self._stretches[number, shard]

    @cached_property
    def checksum(self) -> int:
        """A number for what is got and in which order: the same in every process, as hashes of numbers are."""
        traces = {id(entry.trace): entry.trace for entry in self.entries}  # which many entries share
        copies = {key: _number(repr(trace.to_hf)) for key, trace in traces.items()}
        said = []
        for entry in self.entries:
            names = _number(f"{entry.held.name} {entry.hf} {entry.held.dtype}")
            said.append((names, entry.sent, entry.starts or (), copies[id(entry.trace)]))
        return hash(tuple(said))

    def size_of(self, places: Iterable[tuple[int, int]]) -> int:
        """Bytes of the outputs at ``places``."""
        return sum(self.outputs[output].num_bytes for output, _ in places)

    def sizes_together(self, keys: Sequence[object]) -> dict[object, int]:
        """By key, the bytes of the outputs that are given out together."""
        found: dict[object, dict[int, int]] = {}
        for key, places in zip(keys, self.places, strict=True):
            found.setdefault(key, {}).update(places)
        return {key: self.size_of(places.items()) for key, places in found.items()}

    def load_groups(self, bucket_bytes: int) -> tuple[object, ...]:
        """For each entry a key: what becomes of those of one key is given out together.

        An engine fuses, within one load call, projections of an attention; the parts of one parameter, such as gate and
        up; and the experts of a layer, which go together unless they alone take more than ``bucket_bytes``.
        """
        layers: dict[str, dict[int, int]] = {}
        for entry, found in zip(self.entries, self.places, strict=True):
            if expert_of(entry.held.name) is not None:
                sizes = layers.setdefault(_experts(entry), {})
                sizes.update((output, self.outputs[output].num_bytes) for output, _ in found)
        kept = {layer for layer, sizes in layers.items() if sum(sizes.values()) <= bucket_bytes}
        return tuple(self._key(*each, kept) for each in zip(self.entries, self.places, strict=True))

    @staticmethod
    def _key(entry: ParamEntry, found: Sequence[tuple[int, int]], kept: Collection[str]) -> object:
        if expert_of(entry.held.name) is not None:
            return _experts(entry) if _experts(entry) in kept else found[0][0]
        return next(filter(None, map(fused_module, entry.hf)), entry.held.name)


def _number(text: str) -> int:
    return zlib.crc32(text.encode())


def _experts(entry: ParamEntry) -> str:
    return entry.held.name.partition(".experts.")[0]
