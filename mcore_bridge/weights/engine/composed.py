"""An export into the memory of an engine: copies composed with its map, from this rank's tensors and from windows.

Codes of weights can be written there when they are made, so that nothing is copied.

An HF tensor is made only if the map casts it, or if the composition of the two copies is not a few boxes. It is then
copied from there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from mcore_bridge.rules.spec import Pair
from mcore_bridge.weights.engine.group_copies import GroupCopies
from mcore_bridge.weights.plan.boxes import NO_ROWS, ByteCopy, Rows, RowSizes, placed_rows, stacked
from mcore_bridge.weights.plan.engine_map import EngineMap, SliceCopy
from mcore_bridge.weights.plan.export_plan import Message
from mcore_bridge.weights.plan.map_slices import MapSlices
from mcore_bridge.weights.transfer.copier import Allocations, Buffers, CopyTable, RowPlaces
from mcore_bridge.weights.transfer.endpoints import Maker, Outputs, Sources
from mcore_bridge.weights.transfer.executor import exhaust, run_alone
from mcore_bridge.weights.transfer.program import WINDOWS, Program, Step

_AT_ONCE = 16
"""The messages whose copies run at once."""


@dataclass(frozen=True, slots=True, eq=False)
class EngineStep(Step):
    """A step whose message also has bytes for tensors of the engine."""

    composed: tuple[ByteCopy, ...]
    """Copies into the engine's tensors. Buffers are this rank's tensors, the engine's tensors and the windows."""


class EngineProgram(Program):
    """The steps of a rank whose outputs are tensors of an engine. The constructor computes all of them.

    Args:
        program: the steps whose outputs are HF tensors.
        engine_map: the engine's map.
        receiver: the rank of the engine's worker; None is the rank of ``program``. Of another rank's worker, only what
            this rank sends to it is known here.
        encoded: codes whose rows can be written into the engine's tensors when they are made.
    """

    def __init__(
        self,
        program: Program,
        engine_map: EngineMap,
        receiver: int | None = None,
        encoded: RowSizes = NO_ROWS,
    ) -> None:
        super().__init__(program.plans, program.rank, program.num_stages)
        if receiver is not None and not self.is_gather:
            self.plan = program.plans[receiver]
        self.of, self.map = program, MapSlices(engine_map).narrowed(self.plan.payload.tensors())
        self.copies: tuple[tuple[SliceCopy, ...], ...] = tuple(
            tuple(copy for name in output.names for copy in self.map.by_hf.get(name, ()))
            for output in self.plan.payload.outputs
        )
        """The map's copies from each HF tensor."""
        self.made = {number for number, copies in enumerate(self.copies) if any(copy.casts for copy in copies)}
        """The numbers of outputs that are HF tensors and not tensors of the engine."""
        self._composed = [self._compose(message.number) for message in self.plan.messages]
        while any(composed is None for composed in self._composed):
            self._composed = [self._compose(message.number) for message in self.plan.messages]
        self.whole = {
            byte_copy.source
            for number in range(len(self.plan.messages) if self.made else 0)
            for of_output in self._written(number).values()
            for byte_copy in of_output
        }
        """The numbers of tensors from which HF tensors are made."""
        self.encoded = encoded
        self.places = self._placed()
        """Where the rows of codes belong that no copy brings to the engine."""

    def _placed(self) -> dict[int, Rows]:
        """Take the copies of codes out whose rows can be written into the engine's tensors."""
        copies = chain.from_iterable(composed or () for composed in self._composed)
        sizes = {number: size for number, size in self.encoded.items() if number not in self.whole}
        places = placed_rows(copies, sizes, len(self.names))
        self._composed = [
            tuple(copy for copy in composed or () if copy.source not in places) for composed in self._composed
        ]
        return places

    def copies_of_rank(self) -> tuple[ByteCopy, ...]:
        """The copies from the tensors of this rank into the engine's tensors, of all messages."""
        every = chain.from_iterable(composed or () for composed in self._composed)
        return tuple(copy for copy in every if copy.source < len(self.names))

    def _made(self, arrived: int | None, following: int | None, unpack: bool, pack: bool, lend: bool) -> Step:
        step = super()._made(arrived, following, unpack, pack, lend)
        composed = self._composed[arrived] if unpack and arrived is not None else ()
        return EngineStep(step.copies, step.held, step.outputs, step.alike, step.lent, composed or ())

    def _written(self, arrived: int) -> dict[int, list[ByteCopy]]:
        return {output: copies for output, copies in super()._written(arrived).items() if output in self.made}

    def _compose(self, number: int) -> tuple[ByteCopy, ...] | None:
        """The copies of a message into the engine's tensors; None if another HF tensor has to be made."""
        first, windows = len(self.names), len(self.names) + len(self.map.tensors)
        written: dict[int, list[ByteCopy]] = {}
        made = len(self.made)
        for output, byte_copies in super()._written(number).items():
            if output in self.made:
                continue
            try:
                for byte_copy in byte_copies:
                    source = byte_copy.source if byte_copy.source < first else windows
                    for copy in self.copies[output]:
                        target = first + self.map.places[copy.tensor]
                        composed = byte_copy.then(copy.box)
                        written.setdefault(target, []).extend(
                            c._replace(source=source, target=target) for c in composed
                        )
            except ValueError:
                self.made.add(output)
        if len(self.made) > made:
            return None
        return tuple(chain.from_iterable(map(stacked, written.values())))


@dataclass(frozen=True, slots=True)
class LastRound:
    """What a round has copied into an engine."""

    program: Program
    allocations: Allocations
    """Where the parameters of this rank lay."""
    maker: Maker | None
    form: object
    """The format in which weights left."""
    device: torch.device

    def is_like(self, program: Program, form: object, parameters: Buffers, repeated: Buffers) -> bool:
        """Whether a round sends what a repetition has sent from the parameters ``repeated``."""
        is_alike = (program, form) == (self.program, self.form)
        return is_alike and np.array_equal(parameters.addresses, repeated.addresses)


class MapWriter(ABC):
    """The end of an export in the memory of one rank of an engine. It works for any number of rounds.

    Composed copies of several messages run at once, unless they read windows, which the next messages overwrite. While
    a GPU runs them, this rank checks the tensors of the next messages.

    Args:
        engine_map: the engine's map.
    """

    def __init__(self, engine_map: EngineMap) -> None:
        self.map = engine_map
        self.program: EngineProgram | None = None
        """Kept between rounds."""
        self._tables: dict[tuple[EngineStep, ...], CopyTable] = {}
        self._due: list[EngineStep] = []
        self._held: Buffers | None = None
        self._sources: Sources | None = None
        self._places: RowPlaces | None = None
        self.memory = Buffers([])
        """The engine's tensors in the order of its map, uint8 [bytes] each, if this process has them."""
        self.last: LastRound | None = None
        """The last round, if the next one may begin like it."""

    def begin(self, sources: Sources, device: torch.device) -> tuple[EngineProgram, EngineOutputs]:
        """The steps and the outputs of a round, instead of those that make HF tensors."""
        program, maker = sources.program, sources.maker
        is_alone = len(program.plan.streams) == 1  # so no other rank needs the codes
        encoded = maker.rows if maker is not None and is_alone and self._takes_rows(maker, device) else NO_ROWS
        if self.program is None or self.program.of is not program or self.program.encoded is not encoded:
            self.program, self._tables = EngineProgram(program, self.map, encoded=encoded), {}
            self._places = None
        if maker is not None:
            self._place(self.program, maker)
        self._due, self._held, self._sources, self.last = [], None, sources, None
        return self.program, EngineOutputs(self.program, self, device)

    def _takes_rows(self, maker: Maker, device: torch.device) -> bool:
        """Whether ``maker`` may write rows of codes where the engine keeps them."""
        return self.memory.takes_rows(device)

    def _place(self, program: EngineProgram, maker: Maker) -> None:
        """Say where rows of codes belong."""
        if program.places and (self._places is None or self._places.memory is not self.memory):
            self._places = RowPlaces(program.places, self.memory)
        maker.places = self._places

    def repeat(self, last: LastRound) -> Buffers | None:
        """Begin to copy all that the last round of this writer has copied, without a look at the tensors.

        Returns:
            The parameters that are copied, where they lay; None if the last round of this writer was another one.
        """
        if self.last is not last or self.program is None:
            return None
        self._due, self._held = [], None
        parameters = Buffers.of(last.allocations)
        held = parameters.at(last.program.made_of)
        if last.maker is not None:
            held = held.with_others([*last.maker.make(None, held)])
        outputs = EngineOutputs(self.program, self, last.device)
        exhaust(run_alone(self.program, outputs, lambda step: held, last.device))
        self.run_due(last.device)
        return parameters

    def take(self, step: EngineStep, held: Buffers, windows: Tensor) -> None:
        """Run the composed copies of a step, now or together with the next ones."""
        if held is not self._held:
            self._run_with(windows)
            self._held = held
            self._hold(held)
        if step.composed:
            self._due.append(step)
        if windows.numel() or len(self._due) == _AT_ONCE:
            self._run_with(windows)

    def _run_with(self, windows: Tensor) -> None:
        steps, self._due = tuple(self._due), []
        if steps:
            if steps not in self._tables:
                self._tables[steps] = CopyTable(chain.from_iterable(step.composed for step in steps))
            self._run(self._tables[steps], windows)

    def run_due(self, device: torch.device) -> None:
        """Run the copies that wait for others."""
        self._run_with(torch.empty(0, dtype=torch.uint8, device=device))

    def end(self, device: torch.device, *, repeats: object = None) -> None:
        """Run what is left, and wait until the engine has everything.

        Args:
            repeats: the format of the weights, if the next round may begin like this one; else None. It may if no bytes
                came from other ranks, and no weight of this rank was merged for it.

        Raises:
            ExportError: when a number is not finite that a repetition has encoded.
        """
        self.run_due(device)
        sources, self._sources = self._sources, None
        if sources is not None and repeats is not None and (sources.maker is None or sources.maker.is_placed):
            self.last = LastRound(sources.program, sources.parameters.allocations, sources.maker, repeats, device)
        self._held = None
        if self.last is not None and self.last.maker is not None:
            self.last.maker.check(waits=True)  # before the engine counts the round as written
        self.complete()

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        """Memory for windows, uint8 [num_bytes]."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    @abstractmethod
    def write_group(self, group: Sequence[Pair]) -> None:
        """Copy HF tensors into the engine's tensors by the map for what is sent."""

    @abstractmethod
    def complete(self) -> None:
        """Wait until everything is written."""

    def let_go(self) -> None:
        """Hold no tensors of this rank, once a round has ended: a trainer may free or move them."""
        self._sources = self._held = None
        if self.last is not None:
            self.last.allocations.wholes = []

    def close(self) -> None:
        """Forget the engine and all rounds."""
        self.let_go()
        self.program = self.last = self._places = None
        self._tables, self._due = {}, []

    @abstractmethod
    def _hold(self, held: Buffers) -> None:
        """Take the tensors of this rank, from which the next copies read."""

    @abstractmethod
    def _run(self, table: CopyTable, windows: Tensor) -> None:
        """Run copies from the tensors of this rank and from ``windows``, which may be overwritten when this returns.

        On a GPU they may be overwritten in the order of the current stream.
        """


class MemoryWriter(MapWriter):
    """Writes into memory that this process has.

    Args:
        engine_map: the engine's map.
    """

    def __init__(self, engine_map: EngineMap) -> None:
        super().__init__(engine_map)
        self._buffers = Buffers([])

    def write_group(self, group: Sequence[Pair]) -> None:
        """See ``MapWriter``."""
        assert self.program is not None
        GroupCopies(self.program.map, group).run(group, self.memory, by_kernel=False)

    def end(self, device: torch.device, *, repeats: object = None) -> None:
        """See ``MapWriter``. The memory has everything then, so tensors of this rank are no longer held."""
        super().end(device, repeats=repeats)
        self.let_go()

    def complete(self) -> None:
        """See ``MapWriter``."""
        for index in self.memory.gpus:
            torch.cuda.current_stream(index).synchronize()

    def let_go(self) -> None:
        """See ``MapWriter``."""
        super().let_go()
        self._buffers = Buffers([])

    def _hold(self, held: Buffers) -> None:
        self._buffers = held.beside(self.memory)

    def _run(self, table: CopyTable, windows: Tensor) -> None:
        table.run(self._buffers, Buffers([windows], frozenset()), windows.device)


class EngineOutputs(Outputs):
    """The tensors of an engine, and the few HF tensors from which some of them are copied.

    Args:
        writer: reaches the memory of the engine.
        device: where HF tensors are made.
    """

    def __init__(self, program: EngineProgram, writer: MapWriter, device: torch.device) -> None:
        super().__init__(program.plan, device)
        self._writer = writer

    def allocate(self, num_bytes: int) -> Tensor:
        """Memory for windows that the engine's end can read."""
        return self._writer.allocate(num_bytes, self._device)

    def run(self, step: Step, held: Buffers, passing: Sequence[Tensor], device: torch.device) -> None:
        """As ``Outputs.run``, and into the engine's tensors."""
        super().run(step, held, passing, device)
        assert isinstance(step, EngineStep)
        self._writer.take(step, held, passing[WINDOWS])

    def closed(self, message: Message) -> Iterator[Pair]:
        """Copy the HF tensors that a message completes into the engine's tensors. Nothing is yielded."""
        made = [(self._outputs[number], self._open.pop(number)) for number in message.done if number in self._open]
        if made:
            self._writer.write_group([(name, t) for output, t in made for name in output.names])
        yield from ()
