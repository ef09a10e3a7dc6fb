"""Compares the weights that an engine holds with HF tensors, bit by bit, by its map. Nothing is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from mcore_bridge.rules.spec import Pair, TensorSpec
from mcore_bridge.weights.engine.engine_tensors import EngineMemory, EngineModel
from mcore_bridge.weights.engine.group_copies import Constants, take_expected
from mcore_bridge.weights.engine.mapped_engine import specs_of
from mcore_bridge.weights.ipc.buckets import BucketPlan
from mcore_bridge.weights.plan.engine_map import EngineMap, EngineTensor, SliceFill, Uncovered
from mcore_bridge.weights.plan.map_slices import MapSlices
from mcore_bridge.weights.transfer.copier import WORDS, Buffers


@dataclass(frozen=True, slots=True)
class WrongSlice:
    """A slice of an engine's tensor that does not hold what the trainer has."""

    tensor: str
    """The engine's name of the tensor."""
    hf: str
    """The HF tensor whose values belong there; empty for a constant, such as padding."""
    num_wrong: int
    """Elements of which at least one bit differs."""
    num_elements: int
    """Elements of the slice."""

    def __str__(self) -> str:
        """One line."""
        what = f"of {self.hf}" if self.hf else "of constants"
        return f"{self.tensor}: {self.num_wrong} of {self.num_elements} elements {what}"


@dataclass(frozen=True, slots=True)
class Compared:
    """What a comparison found."""

    num_tensors: int
    """The engine's tensors of which every element was compared that its loader writes."""
    wrong: tuple[WrongSlice, ...] = ()
    """The slices that differ."""
    left_out: tuple[Uncovered, ...] = ()
    """The engine's tensors that only its loader can make, which were not compared."""


class MapComparison:
    """Takes a round as a ``MappedEngine`` does, and compares in place of writing.

    Args:
        engine_map: the map of the engine.
        source: the engine's model, or a function that returns its tensors by name.
    """

    def __init__(self, engine_map: EngineMap, source: EngineModel) -> None:
        self._map = self._sent = engine_map
        self._memory = EngineMemory(engine_map, source)
        self._due: dict[str, TensorSpec] = {}
        self._counts: list[tuple[str, str, int, Tensor]] = []

    def begin(self, plan: BucketPlan | Sequence[TensorSpec]) -> None:
        """Announce the HF tensors of ``plan``, or the slices that the map uses.

        Raises:
            TransferError: when the map does not fit the plan or the engine.
        """
        specs = specs_of(plan) if isinstance(plan, BucketPlan) else tuple(plan)
        self._sent, self._due = MapSlices(self._map).narrowed(specs), {spec.name: spec for spec in specs}
        self._counts = []
        self._memory.find()

    def write(self, pairs: Sequence[Pair], *, stay: bool = False) -> None:
        """Compare these contiguous HF tensors, or slices of them, with the engine's tensors."""
        take_expected(pairs, self._due)
        for name, tensor in pairs:
            for copy in self._sent.by_hf.get(name, ()):
                dtype, held = self._map.dtypes[copy.tensor], copy.box.target_in(self._words(copy.tensor))
                given = copy.box.source_in(tensor).to(held.device)  # the slot may be on another GPU
                given = (given.to(dtype) if copy.casts else given).view(held.dtype)
                self._counts.append((copy.tensor, name, given.numel(), (given != held).sum()))

    def complete(self, version: int | None = None) -> None:
        """End the round: compare constants too."""
        for tensor in self._map.tensors:
            fills = tuple(entry for entry in self._map.fills if entry.tensor == tensor.name)
            if fills:
                num_elements = sum(entry.box.num_elements for entry in fills)
                self._counts.append((tensor.name, "", num_elements, self._num_wrong_constants(tensor, fills)))

    def break_off(self) -> None:
        """Forget the round."""
        self._counts = []

    def _num_wrong_constants(self, tensor: EngineTensor, fills: tuple[SliceFill, ...]) -> Tensor:
        """How many constants of a tensor differ. A copy may lie over some of them, so copies are left as they are."""
        alone = EngineMap(self._map.engine, (), (tensor,), (), fills)
        wanted = Buffers([self._memory.buffers.tensors[self._map.places[tensor.name]].clone()])
        Constants(alone).write(wanted)
        held, filled = self._words(tensor.name), wanted.tensors[0].view(WORDS[tensor.dtype.itemsize])
        for copy in self._map.copies:
            if copy.tensor == tensor.name:
                copy.box.target_in(filled).copy_(copy.box.target_in(held))
        return (filled != held).sum()

    def _words(self, name: str) -> Tensor:
        """A tensor of the engine as integers [elements]: so NaN equals NaN, and -0.0 differs from 0.0."""
        memory = self._memory.buffers.tensors[self._map.places[name]]
        return memory.view(WORDS[self._map.dtypes[name].itemsize])

    @property
    def result(self) -> Compared:
        """What was found, after ``complete``."""
        left_out = {entry.tensor for entry in self._map.uncovered}
        counts = [(*entry[:3], int(entry[3].item())) for entry in self._counts if entry[0] not in left_out]
        wrong = tuple(WrongSlice(tensor, hf, number, size) for tensor, hf, size, number in counts if number)
        return Compared(len(self._map.tensors) - len(left_out), wrong, self._map.uncovered)
