"""The memory at both ends of an exchange: the tensors of this rank, and HF tensors that are not complete yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, lt
from typing import Protocol

import torch
from torch import Tensor, UntypedStorage

from mcore_bridge.errors import ExportError
from mcore_bridge.machine import uncollected
from mcore_bridge.weights.plan.boxes import WIDEST, ByteCopy, Rows, RowSizes
from mcore_bridge.weights.plan.export_plan import SLAB, ExportPlan, Message
from mcore_bridge.weights.plan.payload import OutputTensor
from mcore_bridge.weights.transfer.copier import Buffers, Made, PlacedMaker, RowPlaces
from mcore_bridge.weights.transfer.program import Program, Step
from mcore_bridge.weights.transfer.quantized_parameters import memory_of_all

Merge = Callable[[Tensor], Tensor]
"""A function from a tensor of this rank to the tensor that is sent in its place."""
_NBYTES = attrgetter("nbytes")


def check_storage(tensors: Mapping[str, Tensor]) -> None:
    """Raise ``ExportError`` if a tensor has no values to export."""
    _storages(tensors, memory_of_all([*tensors.values()]))


def _storages(names: Iterable[str], memory: Sequence[Tensor]) -> tuple[list[UntypedStorage], list[int]]:
    """The storage of each tensor, and its address. Raise ``ExportError`` if a tensor has no values to export."""
    storages = [*map(Tensor.untyped_storage, memory)]
    addresses = [*map(UntypedStorage.data_ptr, storages)]
    sizes = map(UntypedStorage.nbytes, storages)
    if 0 in addresses or any(map(lt, sizes, map(_NBYTES, memory))):
        for name, own, storage in zip(names, memory, storages, strict=True):
            if storage.nbytes() < own.nbytes or own.is_meta:
                raise ExportError(
                    f"{name} has no storage: it is on the meta device or its memory was freed; bring it back"
                )
    return storages, addresses


class Maker(Protocol):
    """Makes many tensors of an export on a GPU, several at once."""

    @property
    def numbers(self) -> frozenset[int]:
        """The numbers of the tensors that it makes, in the order of the names of a program."""

    @property
    def rows(self) -> RowSizes:
        """The sizes of those whose rows it can write into the memory of an engine; one object for a program."""

    places: RowPlaces | None
    """Where an engine keeps such rows."""

    @property
    def is_placed(self) -> bool:
        """Whether it writes all of them there."""

    @property
    def form(self) -> object:
        """The format in which they leave."""

    @property
    def is_of_parameters(self) -> bool:
        """Whether all are made of parameters of this rank, and none of merged weights."""

    def placed(
        self, places: Mapping[int, Rows], copies: Iterable[ByteCopy]
    ) -> tuple[PlacedMaker, Callable[[int, int], ExportError]]:
        """What makes codes in an engine's process, with their scales, and what makes an error of its ``wrong``.

        Args:
            places: the places of their rows there, by the numbers of the codes.
            copies: the copies that the engine needs, those of scales among them.
        """

    def make(self, numbers: Sequence[int] | None, held: Buffers) -> Iterator[Made]:
        """Make tensors of these numbers, or all, from the tensors of this rank. What comes with them is made, too."""

    def check(self, *, waits: bool) -> None:
        """Raise ``ExportError`` if something could not be made. What the GPU still makes is left out, or waited for."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank sends.

    Attributes:
        tensors: its parameters by canonical name.
        merges: functions from parameters to what is sent of them, by the name of the latter.
        maker: makes other tensors that are not sent as they are.
    """

    tensors: Mapping[str, Tensor]
    merges: Mapping[str, Merge] = field(default_factory=dict)
    maker: Maker | None = None


class Sources:
    """This rank's tensors, in the memory that they have when an export begins.

    A tensor that is made of another one is made when a step first reads it, and freed after its last message.

    Raises:
        ExportError: when any of them has no memory.
    """

    @uncollected()
    def __init__(self, program: Program, held: Held) -> None:
        self.program, self.maker = program, held.maker
        self._own = [*map(held.tensors.__getitem__, program.parameters)]
        memory = memory_of_all(self._own)
        self._storages, self._addresses = _storages(program.parameters, memory)  # these stay even if tensors move
        self.parameters = Buffers([*map(Tensor.contiguous, memory)])
        """The parameters of this rank, in the order of the program."""
        self._made_of = program.made_of.tolist()
        self._buffers = self.parameters.at(program.made_of)
        named = enumerate(program.names) if held.merges else ()
        self._merges = {number: held.merges[name] for number, name in named if name in held.merges}
        self._unmade = frozenset(self._merges) | (frozenset() if self.maker is None else self.maker.numbers)
        self._last = len(program.plan.messages) - 1
        self._made: dict[int, Made] = {}
        self._current = self._buffers

    def read_by(self, step: Step) -> Buffers:
        """All tensors, after a check that the tensors of a step have not moved."""
        storages, addresses = self._storages, self._addresses
        read = {self._made_of[number] for number in step.held}
        if moved := [place for place in read if storages[place].data_ptr() != addresses[place]]:
            raise ExportError(
                f"{self.program.parameters[min(moved)]} was freed or moved during an export; leave the model in place "
                "until it ends"
            )
        if new := sorted(self._unmade.intersection(step.held) - self._made.keys()):
            for made in self._make(new):
                self._made.update(dict.fromkeys(made.numbers.tolist(), made))
            self._replace()
        return self._current

    def _make(self, numbers: Sequence[int]) -> Iterator[Made]:
        for number in self._merges.keys() & numbers:
            yield Made.of({number: self._merges[number](self._own[self._made_of[number]])})
        if self.maker is not None and (others := [number for number in numbers if number not in self._merges]):
            yield from self.maker.make(others, self._buffers)

    def leave_to_engine(self) -> None:
        """Make nothing of what the maker makes, since the process of an engine does it."""
        self.maker, self._unmade = None, frozenset(self._merges)

    def check(self, *, waits: bool) -> None:
        """See ``Maker``."""
        if self.maker is not None:
            self.maker.check(waits=waits)

    def passed(self, message: int) -> None:
        """Free tensors that were made and that no message soon after this one needs; after the last one, check all.

        Raises:
            ExportError: when something could not be made.
        """
        if message == self._last:
            self.check(waits=True)
        idle = self._made.keys() & self.program.idle_after.get(message, ()) if self._made else ()
        for number in idle:
            del self._made[number]
        if idle:
            self._replace()

    def _replace(self) -> None:
        others = [*dict.fromkeys(self._made.values())]
        self._current = self._buffers.with_others(others) if others else self._buffers


class Outputs:
    """HF tensors that are open: allocated, and not yet yielded."""

    def __init__(self, plan: ExportPlan, device: torch.device) -> None:
        self._outputs, self._device = plan.payload.outputs, device
        self._names = plan.payload.names
        self._copied = plan.payload.copied
        self._like = {dtype: torch.empty(0, dtype=dtype, device=device) for dtype in plan.dtypes}
        self._gpus = Buffers([torch.empty(0, device=device)]).gpus
        """The GPUs of outputs and windows. A check of each of thousands of tensors would take longer."""
        self._open: dict[int, Tensor] = {}

    def run(self, step: Step, held: Buffers, passing: Sequence[Tensor], device: torch.device) -> None:
        """Run a step that reads this rank's tensors and windows. Outputs that do not exist yet are allocated.

        Args:
            passing: the buffers between this rank's tensors and the outputs, in their order.
        """
        for output, numbers in step.alike:
            is_new = self._open.keys().isdisjoint(numbers)
            new = numbers if is_new else [number for number in numbers if number not in self._open]
            self._open.update(zip(new, self._allocated(output, len(new)), strict=True))
        if len(step.copies.table):
            others = [*passing, *map(self._open.__getitem__, step.outputs)]
            step.copies.run(held, Buffers(others, self._gpus), device)

    def allocate(self, num_bytes: int) -> Tensor:
        """Memory for windows, uint8 [num_bytes]."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def _allocated(self, output: OutputTensor, count: int) -> Sequence[Tensor]:
        """``count`` new tensors like ``output``.

        On GPUs small tensors share an allocation, since allocations would take longer than the transfer. Torch does not
        treat them as views of one tensor. If a tensor is pickled, the whole allocation is written.
        """
        like, num_bytes = self._like[output.dtype], output.num_bytes
        is_small = like.is_cuda and 0 < num_bytes <= SLAB and num_bytes % WIDEST == 0
        per_slab = SLAB // num_bytes if is_small else 1
        tensors: list[Tensor] = []
        while (left := count - len(tensors)) > 0:
            rows, *others = output.shape or (1,)
            slab = like.new_empty((min(left, per_slab) * rows, *others))
            tensors += slab.unsafe_split(rows) if left > 1 and per_slab > 1 else [slab]
        return tensors if output.shape else [tensor.squeeze() for tensor in tensors]

    def lend(self, step: Step, windows: Tensor) -> None:
        """Use views of ``windows`` as outputs, for outputs that lie whole in them."""
        for number, start in step.lent:
            output = self._outputs[number]
            view = windows[start : start + output.num_bytes].view(output.dtype)
            self._open[number] = view.view(output.shape)

    def closed(self, message: Message) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that a message completes. From then on they belong to the caller."""
        for number in {*message.done}.difference(self._open):  # an empty slice
            output = self._outputs[number]
            self._open[number] = self._like[output.dtype].new_empty(output.shape)
        if self._copied.isdisjoint(message.done):  # the rule, and fast
            yield from zip(map(self._names.__getitem__, message.done), map(self._open.pop, message.done), strict=True)
            return
        for number in message.done:
            tensor, output = self._open.pop(number), self._outputs[number]
            *others, name = output.name, *output.copies
            for other in others:  # cloned before the caller has the tensor and may change it
                yield other, tensor.clone()
            yield name, tensor

    def clear(self) -> None:
        """Free all open tensors."""
        self._open.clear()
