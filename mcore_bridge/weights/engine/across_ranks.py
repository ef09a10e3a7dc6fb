"""Copies from each rank of a replica straight into the memory of all workers on its machine, without messages.

A worker gets parts of its tensors from several ranks. By messages each of them packs its part, NCCL carries it, and the
rank of the worker unpacks it. Here each rank writes its own part, over the link between two GPUs if need be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from mcore_bridge.errors import ExportError, TransferError, describe, grouped_by_rank
from mcore_bridge.weights.agreement import Export
from mcore_bridge.weights.engine.composed import EngineProgram, MapWriter
from mcore_bridge.weights.ipc.shared_memory import Handle, open_all
from mcore_bridge.weights.plan.boxes import ByteCopy
from mcore_bridge.weights.plan.engine_map import EngineMap
from mcore_bridge.weights.transfer.collectives import Group
from mcore_bridge.weights.transfer.copier import Allocations, Buffers, CopyTable
from mcore_bridge.weights.transfer.endpoints import Held, Sources
from mcore_bridge.weights.transfer.failures import any_of_ranks, raise_on_all
from mcore_bridge.weights.transfer.program import Program

MoreHandles = Callable[[int], Sequence[Sequence[Handle]]]
"""From a number of processes to handles of the memory of a worker, for each of them."""
PART_BYTES = 512 << 20
"""About as many bytes as one table copies."""
_OTHER = "expected the memory of an engine with the map of this export, found other memory: begin the round again"


@dataclass(frozen=True, slots=True)
class _Copied:
    """What this rank has copied in the last round. All ranks of the replica have one, or none has."""

    group: Group
    allocations: Allocations
    """Where the tensors of this rank lay."""


class AcrossRanks:
    """The rounds into at most one worker for each rank of a replica, whose ranks are all on one machine.

    All ranks of the replica have one of these.
    """

    def __init__(self) -> None:
        self._program: Program | None = None
        self._fits = False
        self._copies: dict[int, tuple[ByteCopy, ...]] = {}
        """What this rank copies to the worker of each rank, if anything."""
        self._memory = Buffers([])
        """The tensors of these workers, one worker after the other, if they take weights."""
        self._tables: list[CopyTable] = []
        """The copies into this memory."""
        self._own: MapWriter | None = None
        self._senders: list[int] = []
        """The ranks that copy to the worker of this rank."""
        self.problem = ""
        """Why a rank cannot open the memory of a worker, so that rounds of this plan go by messages."""
        self._last: _Copied | None = None
        self._stream: torch.cuda.Stream | None = None
        self._begun: Buffers | None = None
        """The tensors from which the copies of the last round run again, if they do."""
        self._seen: Buffers | None = None
        """The tensors of this rank, if it has looked at them while it copies."""

    def begin(self, reached: Callable[[], MapWriter | None], *, is_settled: bool) -> None:
        """Run the copies of the last round again while the ranks prepare this one. All ranks call it together.

        They count for a rank if the plan is still the same, and if its tensors still lie at the same addresses.

        Args:
            reached: as for ``run``.
            is_settled: whether no parameter of this rank is pending.
        """
        self._begun = self._seen = None
        if self._last is None:
            return
        last, self._last, is_ready, problem = self._last, None, False, ""
        try:
            is_ready = is_settled and last.allocations.find() and reached() is self._own
        except Exception as error:  # other ranks must hear of it
            problem = describe(error)
        (some_wait,) = any_of_ranks(last.group, problem, [not is_ready])
        if some_wait:
            return
        begun, device = Buffers.of(last.allocations), last.group.device
        with suppress(Exception), self._beside_current(device):  # ``run`` meets an error again, and all ranks raise it
            self._copy(begun, device)
            self._begun = begun

    def _beside_current(self, device: torch.device) -> AbstractContextManager[object]:
        """Let kernels of the block run on a separate stream, so that the next collectives need not wait for them."""
        if device.type != "cuda":
            return nullcontext()
        self._stream = self._stream or torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(self._stream)

    def _copy(self, held: Buffers, device: torch.device) -> None:
        buffers, nothing = held.beside(self._memory), Buffers([], frozenset())
        for table in self._tables:
            table.run(buffers, nothing, device)

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
        if self._begun is not None and self._program is not None:
            with suppress(Exception):  # ``run`` meets an error again, and all ranks raise it
                self._seen = Sources(self._program, held).parameters

    def takes(self, export: Export) -> bool:
        """Whether an export can go this way. All ranks call it together, and communicate if its plan is new.

        It cannot if weights are encoded, or if an HF tensor has to be made, such as for a cast.
        """
        if self._program is not export.program:
            self.wait()
            self._begun, self._seen, copies, group = None, None, None, export.group
            with raise_on_all(group, kind=ExportError), suppress(TransferError):  # messages raise it
                copies = _composed(export)
            receivers = group.all_gather_object(None if copies is None else [*copies])
            self._program, self._copies, self.problem = export.program, copies or {}, ""
            self._close()
            self._senders = [rank for rank, of_rank in enumerate(receivers) if group.rank in (of_rank or ())]
            self._fits = None not in receivers
        return self._fits

    def run(self, export: Export, reached: Callable[[], MapWriter | None], more_handles: MoreHandles | None) -> bool:
        """Copy everything. All ranks call it together.

        Args:
            reached: the writer into the worker of this rank; None if it has none, or if that takes no weights now.
            more_handles: handles of the memory of this worker for further processes.

        Returns:
            True once all ranks have copied. False if weights are merged, or if a rank cannot open the memory of a
            worker. Then nothing was copied.

        Raises:
            ExportError: on every rank, when any rank fails.
        """
        group, writer, begun, problem = export.group, None, self._begun, ""
        held, self._begun, self._seen, is_done = self._seen, None, None, False
        try:
            writer = reached()
            held = Sources(export.program, export.held).parameters if held is None else held
            is_done = begun is not None and np.array_equal(held.addresses, begun.addresses)
            if not is_done:
                self.wait()  # before any rank copies again
        except Exception as error:
            problem = describe(error)
        some_made, is_new = any_of_ranks(group, problem, [bool(export.held.merges), writer is not self._own])
        assert held is not None
        if some_made:
            self.wait()
            return False
        if is_new:
            self.problem = grouped_by_rank(group.all_gather_object(self._open(export, writer, more_handles)))
            if self.problem:
                self._close()
                self._fits = False
                return False
        with raise_on_all(group, kind=ExportError):
            if not is_done:
                self._copy(held, group.device)
            self.wait()
            if group.device.type == "cuda":
                torch.cuda.current_stream(group.device).synchronize()
        self._last = _Copied(group, begun.allocations if is_done and begun is not None else held.allocations)
        self._last.allocations.wholes = []  # a trainer may free or move them
        return True

    def _close(self) -> None:
        """Let go of the memory of all workers."""
        self._memory, self._tables, self._own = Buffers([]), [], None

    def _open(self, export: Export, writer: MapWriter | None, more_handles: MoreHandles | None) -> str:
        """Exchange handles of all workers, and open the memory to which this rank copies; what has failed."""
        self._close()
        group, self._own = export.group, writer
        memory: dict[int, list[torch.Tensor]] = {}
        offer: dict[int, Sequence[Handle]] = {}
        problem = ""
        try:
            if writer is not None and more_handles is not None and self._senders:
                offer = dict(zip(self._senders, more_handles(len(self._senders)), strict=True))
        except Exception as error:
            problem = describe(error)
        for receiver, of_worker in enumerate(group.all_gather_object(offer)):
            if group.rank in of_worker:  # torch keeps the engine's memory for a handle that nobody opens
                try:
                    memory[receiver] = open_all(of_worker[group.rank], _digest(export, receiver), _OTHER)
                except Exception as error:
                    problem = describe(error)
        try:
            self._memory = Buffers([*chain.from_iterable(memory.values())])
            self._tables = _interleaved([(self._copies[rank], len(tensors)) for rank, tensors in memory.items()])
        except Exception as error:
            problem = describe(error)
        return problem


def _digest(export: Export, receiver: int) -> str:
    target = export.targets[receiver]
    assert isinstance(target, EngineMap)
    return target.digest


def _interleaved(workers: Iterable[tuple[Sequence[ByteCopy], int]]) -> list[CopyTable]:
    """The copies to all workers, in parts in which each worker has an equal share.

    The links to other GPUs are then busy all the time. A collective on the GPU begins after at most one part, where it
    would wait for the whole of one large kernel.

    Args:
        workers: for each worker the copies to it, and the number of its tensors.
    """
    first, shares, of_all = 0, [np.empty(0)], [np.empty((0, len(ByteCopy._fields)), np.int64)]
    total = 0
    for copies, num_tensors in workers:
        table = np.array(copies, dtype=np.int64)
        column = dict(zip(ByteCopy._fields, table.T, strict=True))  # views
        column["target"] += first
        num_bytes = (column["rows"] * column["cols"] * column["item"]).cumsum()
        first, total = first + num_tensors, total + int(num_bytes[-1])
        shares.append((num_bytes - 1) / num_bytes[-1])
        of_all.append(table)
    order, parts = np.concatenate(shares), -(-total // PART_BYTES)
    number = (order * parts).astype(np.int64)
    sorting = np.argsort(order, kind="stable")
    joined, number = np.concatenate(of_all)[sorting], number[sorting]
    return [CopyTable(joined[number == part]) for part in range(parts)]


def _composed(export: Export) -> dict[int, tuple[ByteCopy, ...]] | None:
    """What this rank copies to workers, by the rank of each; None if some of it is no plain copy."""
    if export.format.is_encoded:
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
