"""The payload of an export to one receiver: entries, and the parts of HF tensors that their rows become."""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from mcore_bridge.rules.mapping import unstacked
from mcore_bridge.rules.names import expert_of, fused_module
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.plan.inventory import ParamEntry


@dataclass(frozen=True, slots=True)
class OutputTensor(TensorSpec):
    """An HF tensor, and the other names under which it is also written."""

    copies: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Its name, and then the others."""
        return self.name, *self.copies

    def specs(self) -> Iterator[TensorSpec]:
        """The spec of the tensor under each of its names."""
        return (TensorSpec.of(name, self) for name in self.names)


class RowRange(NamedTuple):
    """Rows of the sent part of a shard that become a part of one output."""

    output: int
    first: int
    end: int


@dataclass(frozen=True)
class Payload:
    """The entries that a receiver gets, and the outputs that they become. Both are identified by their index."""

    entries: tuple[ParamEntry, ...]
    outputs: tuple[OutputTensor, ...]
    destinations: tuple[tuple[tuple[int, int], ...], ...]
    """For each part of each entry, the index of its output, and the byte at which the part begins in the output."""
    _row_ranges: dict[tuple[int, int], tuple[RowRange, ...]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, entries: Sequence[ParamEntry]) -> Payload:
        """The payload of ``entries``. Several entries may form one output."""
        outputs: list[OutputTensor] = []
        numbers: dict[str, int] = {}
        destinations = []
        for entry in entries:
            of_entry = []
            for index, (hf, shape) in enumerate(zip(entry.hf, entry.trace.part_shapes, strict=True)):
                name, number = unstacked(hf)
                if name not in numbers:
                    numbers[name] = len(outputs)
                    own = entry.shape_of(index)
                    whole = own if number is None else (entry.stack, *own)
                    outputs.append(OutputTensor(name, whole, entry.held.dtype, entry.copies if index == 0 else ()))
                of_entry.append((numbers[name], (number or 0) * math.prod(shape) * entry.held.dtype.itemsize))
            destinations.append(tuple(of_entry))
        return cls(tuple(entries), tuple(outputs), tuple(destinations))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The name of each output."""
        return tuple(output.name for output in self.outputs)

    @cached_property
    def copied(self) -> frozenset[int]:
        """The outputs that have other names, too."""
        return frozenset(number for number, output in enumerate(self.outputs) if output.copies)

    def tensors(self) -> Iterator[TensorSpec]:
        """The specs of all HF tensors."""
        for output in self.outputs:
            yield from output.specs()

    def row_ranges(self, number: int, shard: int) -> tuple[RowRange, ...]:
        """Which rows of a shard of entry ``number`` become which output.

        The result is cached: many ranks send a part of one shard, and planning tries several plans.
        """
        if (number, shard) not in self._row_ranges:
            entry = self.entries[number]
            outputs = [output for output, _ in self.destinations[number]]
            if len(outputs) == 1:
                ranges = [RowRange(outputs[0], 0, entry.sent[0])]
            else:
                copies = entry.copies_of(shard)
                rows = [(c.part, *((at, c.size) if c.dim == 0 else (0, entry.sent[0]))) for c, at in copies]
                ranges = [RowRange(outputs[part], first, first + size) for part, first, size in rows]
            self._row_ranges[number, shard] = tuple(ranges)
        return self._row_ranges[number, shard]

    @cached_property
    def checksum(self) -> int:
        """A hash of the payload and its order, equal in every process, since it is made of numbers only."""
        traces = {id(entry.trace): entry.trace for entry in self.entries}  # many entries share one trace
        copies = {key: _crc(repr(trace.to_hf)) for key, trace in traces.items()}
        rows = []
        for entry in self.entries:
            names = _crc(f"{entry.held.name} {entry.hf} {entry.held.dtype}")
            rows.append((names, entry.sent, entry.starts or (), copies[id(entry.trace)]))
        return hash(tuple(rows))

    def size_of(self, destinations: Iterable[tuple[int, int]]) -> int:
        """Bytes of the outputs at ``destinations``."""
        return sum(self.outputs[output].num_bytes for output, _ in destinations)

    def sizes_together(self, keys: Sequence[object]) -> dict[object, int]:
        """Bytes of the outputs of each key, given the key of each entry."""
        by_key: dict[object, dict[int, int]] = {}
        for key, destinations in zip(keys, self.destinations, strict=True):
            by_key.setdefault(key, {}).update(destinations)
        return {key: self.size_of(destinations.items()) for key, destinations in by_key.items()}

    def load_groups(self, bucket_bytes: int) -> tuple[object, ...]:
        """A key for each entry: the outputs of entries with one key are yielded together.

        An engine fuses these in one load call: the projections of one input, the parts of one parameter, and the
        experts of a layer. Experts are yielded one by one if the experts of a layer take more than ``bucket_bytes``.
        """
        layers: dict[str, dict[int, int]] = {}
        for entry, destinations in zip(self.entries, self.destinations, strict=True):
            if expert_of(entry.held.name) is not None:
                sizes = layers.setdefault(_layer_with_experts(entry), {})
                sizes.update((output, self.outputs[output].num_bytes) for output, _ in destinations)
        whole = {layer for layer, sizes in layers.items() if sum(sizes.values()) <= bucket_bytes}
        return tuple(_load_group(entry.plain, whole) for entry in self.entries)


def _load_group(entry: ParamEntry, whole: Collection[str]) -> str:
    """The key of an entry, given the layers whose experts stay together."""
    if expert_of(entry.held.name) is not None:
        layer = _layer_with_experts(entry)
        return layer if layer in whole else unstacked(entry.hf[0])[0]
    return next(filter(None, map(fused_module, entry.hf)), entry.held.name)


def _crc(text: str) -> int:
    return zlib.crc32(text.encode())


def _layer_with_experts(entry: ParamEntry) -> str:
    return entry.held.name.partition(".experts.")[0]
