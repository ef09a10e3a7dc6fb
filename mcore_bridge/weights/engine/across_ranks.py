"""Copies from each rank of a replica straight into the memory of all workers on its machine, without messages.

A worker gets parts of its tensors from several ranks. By messages each of them packs its part, NCCL carries it, and the
rank of the worker unpacks it. Here each rank writes its own part, over the link between two GPUs if need be. A kernel
that encodes weights writes their codes there. ``PulledByWorkers`` lets the workers copy instead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from mcore_bridge.errors import ExportError, TransferError, describe, grouped_by_rank
from mcore_bridge.weights.agreement import Export, with_codes
from mcore_bridge.weights.engine.composed import EngineProgram, LastRound, MapWriter
from mcore_bridge.weights.ipc.shared_memory import Handle, open_all
from mcore_bridge.weights.plan.boxes import NO_ROWS, ByteCopy, RowSizes, placed_rows
from mcore_bridge.weights.plan.engine_map import EngineMap
from mcore_bridge.weights.sent.encoding import is_by_kernel
from mcore_bridge.weights.transfer.collectives import Group
from mcore_bridge.weights.transfer.copier import Buffers, CopyTable, RowPlaces
from mcore_bridge.weights.transfer.endpoints import Held, Maker, Sources
from mcore_bridge.weights.transfer.failures import any_of_ranks, raise_on_all
from mcore_bridge.weights.transfer.program import Program

MoreHandles = Callable[[int], Sequence[Sequence[Handle]]]
"""From a number of processes to handles of the memory of a worker, for each of them."""
PART_BYTES = 512 << 20
"""About as many bytes as one table copies."""
_OTHER = "expected the memory of an engine with the map of this export, found other memory: begin the round again"


class _Writes:
    """What this rank writes to some workers.

    Args:
        program: the steps of this rank.
        workers: for each worker the copies to it from the tensors of this rank, and the number of its tensors.
        made: the numbers of tensors that a ``Maker`` makes.
        sizes: the codes among them whose rows can be written where workers keep them.
    """

    def __init__(
        self,
        program: Program,
        workers: Iterable[tuple[Sequence[ByteCopy], int]],
        made: frozenset[int],
        sizes: RowSizes,
    ) -> None:
        self._made_of = program.made_of
        copies: list[list[ByteCopy]] = []
        first = 0
        for of_worker, num_tensors in workers:
            copies.append([copy._replace(target=copy.target + first) for copy in of_worker])
            first += num_tensors
        self.rows = placed_rows(chain.from_iterable(copies), sizes, len(program.names))
        self._of_made = [
            [copy for copy in own if copy.source in made and copy.source not in self.rows] for own in copies
        ]
        self._of_launches: dict[bytes, list[CopyTable]] = {}
        """The copies of what a launch makes, by the numbers that it makes."""
        self._plain = _interleaved([copy for copy in own if copy.source not in made] for own in copies)

    def run(self, parameters: Buffers, maker: Maker | None, memory: Buffers, device: torch.device) -> None:
        """Write everything. The device may still run this afterwards.

        Args:
            parameters: the parameters of this rank.
            maker: makes codes and scales, if weights are encoded.
            memory: the tensors of the workers, one worker after the other.
            device: where kernels run.
        """
        held = parameters.at(self._made_of)
        _run(self._plain, held, memory, device)
        for made in () if maker is None else maker.make(None, held):
            if (key := made.numbers.tobytes()) not in self._of_launches:
                own = frozenset(made.numbers.tolist())
                self._of_launches[key] = _interleaved(
                    [copy for copy in of_worker if copy.source in own] for of_worker in self._of_made
                )
            _run(self._of_launches[key], held.with_others([made]), memory, device)


def _run(tables: Iterable[CopyTable], held: Buffers, memory: Buffers, device: torch.device) -> None:
    buffers, nothing = held.beside(memory), Buffers([], frozenset())
    for table in tables:
        table.run(buffers, nothing, device)


@dataclass(frozen=True, slots=True)
class _Copied:
    """What this rank has copied in the last round. All ranks of the replica have one, or none has."""

    group: Group
    round: LastRound


class AcrossRanks(ABC):
    """The rounds into at most one worker for each rank of a replica, whose ranks are all on one machine.

    All ranks of the replica have one of these.
    """

    def __init__(self) -> None:
        self.program: Program | None = None
        self.fits = False
        """Whether rounds of this program can go this way."""
        self.copies: dict[int, tuple[ByteCopy, ...]] = {}
        """What goes from the tensors of this rank to the worker of each rank, if anything."""
        self.senders: list[int] = []
        """The ranks from which something goes to the worker of this rank."""
        self.problem = ""
        """Why rounds of this program go by messages, if a rank has found that out."""

    def begin(self, reached: Callable[[], MapWriter | None], *, is_settled: bool) -> None:
        """Begin what can run while the ranks prepare a round. All ranks call it together.

        Args:
            reached: as for ``run``.
            is_settled: whether no parameter of this rank is pending.
        """
        return

    def look(self, held: Held) -> None:
        """Look at the tensors of this rank before the ranks agree, if that helps."""
        return

    def give_up(self) -> None:
        """Forget what has begun, once it has ended."""
        return

    def takes(self, export: Export) -> bool:
        """Whether an export can go this way. All ranks call it together, and communicate if its plan is new.

        It cannot if an HF tensor has to be made, such as for a cast.
        """
        if self.program is not export.program:
            self.forget()
            copies, group = None, export.group
            with raise_on_all(group, kind=ExportError), suppress(TransferError):  # messages raise it
                copies = _composed(export)
            receivers = group.all_gather_object(None if copies is None else [*copies])
            self.program, self.copies, self.problem = export.program, copies or {}, ""
            self.senders = [rank for rank, of_rank in enumerate(receivers) if group.rank in (of_rank or ())]
            self.fits = None not in receivers
        return self.fits

    @abstractmethod
    def forget(self) -> None:
        """Forget the last program, and all workers."""

    @abstractmethod
    def run(self, export: Export, reached: Callable[[], MapWriter | None], more_handles: MoreHandles | None) -> bool:
        """Copy everything. All ranks call it together.

        Args:
            reached: the writer into the worker of this rank; None if it has none, or if that takes no weights now.
            more_handles: handles of the memory of this worker for further processes.

        Returns:
            True once all ranks have copied. False if weights are merged, if no kernel encodes them, or if a process
            cannot open the memory of another one. Then nothing was copied.

        Raises:
            ExportError: on every rank, when any rank fails.
        """


class WrittenByRanks(AcrossRanks):
    """Each rank opens the memory of the workers, and writes into it."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[tuple[tuple[int, ...], bool], _Writes] = {}
        """What this rank writes, by the ranks of these workers, and by whether rows of codes can be written there."""
        self._writes: _Writes | None = None
        self._memory = Buffers([])
        """The tensors of the workers that take weights."""
        self._places: RowPlaces | None = None
        """Where rows of codes belong in this memory."""
        self._own: MapWriter | None = None
        self._last: _Copied | None = None
        self._stream: torch.cuda.Stream | None = None
        self._begun: tuple[LastRound, Buffers] | None = None
        """The last round whose copies run again, if they do, and the parameters from which they run."""
        self._seen: Buffers | None = None
        """The tensors of this rank, if it has looked at them while it copies."""

    def begin(self, reached: Callable[[], MapWriter | None], *, is_settled: bool) -> None:
        """Run the copies of the last round again while the ranks prepare this one. All ranks call it together.

        They count for a rank if the plan is still the same, and if its tensors still lie at the same addresses.
        """
        self._begun = self._seen = None
        if self._last is None:
            return
        group, last, is_ready, problem = self._last.group, self._last.round, False, ""
        self._last = None
        try:
            is_ready = is_settled and last.allocations.find() and reached() is self._own
        except Exception as error:  # other ranks must hear of it
            problem = describe(error)
        (some_wait,) = any_of_ranks(group, problem, [not is_ready])
        if some_wait:
            return
        parameters = Buffers.of(last.allocations)
        with suppress(Exception), self._beside_current(last.device):  # ``run`` meets an error again, and all ranks too
            self._copy(parameters, last.maker, last.device)
            self._begun = last, parameters

    def _beside_current(self, device: torch.device) -> AbstractContextManager[object]:
        """Let kernels of the block run on a separate stream, so that the next collectives need not wait for them."""
        if device.type != "cuda":
            return nullcontext()
        self._stream = self._stream or torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(self._stream)

    def _copy(self, parameters: Buffers, maker: Maker | None, device: torch.device) -> None:
        if maker is not None:
            maker.places = self._places
        if self._writes is not None:
            self._writes.run(parameters, maker, self._memory, device)

    def give_up(self) -> None:
        """Forget what has begun, once it has ended."""
        self.wait()
        self._begun = self._seen = None

    def wait(self) -> None:
        """Wait until this rank has copied everything."""
        if self._stream is not None:
            self._stream.synchronize()

    def look(self, held: Held) -> None:
        """Look at the tensors of this rank during its copies, since messages between ranks may have to wait for them.

        With CUDA_DEVICE_MAX_CONNECTIONS=1, work of a GPU that is queued behind copies begins behind them.
        """
        if self._begun is not None and self.program is not None:
            with suppress(Exception):  # ``run`` meets an error again, and all ranks raise it
                self._seen = Sources(self.program, held).parameters

    def forget(self) -> None:
        """See ``AcrossRanks``."""
        self.wait()
        self._begun, self._seen, self._known = None, None, {}
        self._close()

    def run(self, export: Export, reached: Callable[[], MapWriter | None], more_handles: MoreHandles | None) -> bool:
        """See ``AcrossRanks``."""
        group, writer, begun, problem = export.group, None, self._begun, ""
        held, self._begun, self._seen, is_done, is_possible = self._seen, None, None, False, False
        try:
            writer = reached()
            held = Sources(export.program, export.held).parameters if held is None else held
            is_done = begun is not None and begun[0].is_like(export.program, export.format, held, begun[1])
            is_possible = not export.held.merges and (is_done or is_by_kernel(export.program, export.held))
            if not is_done:
                self.wait()  # before any rank copies again
        except Exception as error:
            problem = describe(error)
        flags = [not is_possible, writer is not self._own, not is_done]
        are_impossible, is_new, is_undone = any_of_ranks(group, problem, flags)
        assert held is not None
        if are_impossible:
            self.wait()
            return False
        if is_undone or is_new:
            export = with_codes(export)
        if is_new:
            self.problem = grouped_by_rank(group.all_gather_object(self._open(export, writer, more_handles)))
            if self.problem:
                self._close()
                self.fits = False
                return False
        with raise_on_all(group, kind=ExportError):
            last = None if begun is None or not is_done else begun[0]
            maker = export.held.maker if last is None else last.maker
            try:
                if last is None:
                    self._copy(held, maker, group.device)
                    last = LastRound(export.program, held.allocations, maker, export.format, group.device)
            finally:  # nothing may write to workers after a failure
                self.wait()
                if group.device.type == "cuda":
                    torch.cuda.current_stream(group.device).synchronize()
            if maker is not None:
                maker.check(waits=True)
        assert last is not None
        self._last = _Copied(group, last)
        last.allocations.wholes = []  # a trainer may free or move them
        return True

    def _close(self) -> None:
        """Let go of the memory of all workers."""
        self._writes = self._places = self._own = None
        self._memory = Buffers([])

    def _open(self, export: Export, writer: MapWriter | None, more_handles: MoreHandles | None) -> str:
        """Exchange handles of all workers, and open the memory to which this rank copies; what has failed."""
        self._close()
        group, self._own = export.group, writer
        memory: dict[int, list[Tensor]] = {}
        offer: dict[int, Sequence[Handle]] = {}
        problem = ""
        try:
            if writer is not None and more_handles is not None and self.senders:
                offer = dict(zip(self.senders, more_handles(len(self.senders)), strict=True))
        except Exception as error:
            problem = describe(error)
        for receiver, of_worker in enumerate(group.all_gather_object(offer)):
            if group.rank in of_worker:  # torch keeps the engine's memory for a handle that nobody opens
                try:
                    memory[receiver] = open_all(of_worker[group.rank], digest_of(export, receiver), _OTHER)
                except Exception as error:
                    problem = describe(error)
        try:
            self._memory = Buffers([*chain.from_iterable(memory.values())])
            maker, writes_rows = export.held.maker, self._memory.takes_rows(group.device)
            if (tuple(memory), writes_rows) not in self._known:
                workers = [(self.copies[rank], len(tensors)) for rank, tensors in memory.items()]
                made = (maker.numbers, maker.rows if writes_rows else NO_ROWS) if maker else (frozenset[int](), NO_ROWS)
                self._known[tuple(memory), writes_rows] = _Writes(export.program, workers, *made)
            self._writes = self._known[tuple(memory), writes_rows]
            self._places = RowPlaces(self._writes.rows, self._memory) if self._writes.rows else None
        except Exception as error:
            problem = describe(error)
        return problem


def digest_of(export: Export, receiver: int) -> str:
    """The digest of the map of the worker of a rank."""
    target = export.targets[receiver]
    assert isinstance(target, EngineMap)
    return target.digest


def _interleaved(workers: Iterable[Sequence[ByteCopy]]) -> list[CopyTable]:
    """The copies to all workers, in parts in which each worker has an equal share.

    The links to other GPUs are then busy all the time. A collective on the GPU begins after at most one part, where it
    would wait for the whole of one large kernel.

    Args:
        workers: the copies to each worker.
    """
    shares, of_all, total = [np.empty(0)], [np.empty((0, len(ByteCopy._fields)), np.int64)], 0
    for copies in filter(None, workers):
        table = np.array(copies, dtype=np.int64)
        column = dict(zip(ByteCopy._fields, table.T, strict=True))
        num_bytes = (column["rows"] * column["cols"] * column["item"]).cumsum()
        total += int(num_bytes[-1])
        shares.append((num_bytes - 1) / num_bytes[-1])
        of_all.append(table)
    order, parts = np.concatenate(shares), -(-total // PART_BYTES)
    number = (order * parts).astype(np.int64)
    sorting = np.argsort(order, kind="stable")
    joined, number = np.concatenate(of_all)[sorting], number[sorting]
    return [CopyTable(joined[number == part]) for part in range(parts)]


def _composed(export: Export) -> dict[int, tuple[ByteCopy, ...]] | None:
    """What this rank copies to workers, by the rank of each; None if something else has to be made of tensors.

    A kernel may make codes and scales.
    """
    if not is_by_kernel(export.program, export.held):
        return None
    tables = {}
    for receiver, target in enumerate(export.targets):
        if target == "nothing":
            continue
        if not isinstance(target, EngineMap):
            return None
        program = EngineProgram(export.program, target, receiver)
        if program.made:
            return None
        if copies := program.copies_of_rank():
            tables[receiver] = copies
    return tables
