"""The sender's side of a pull: the engine's process opens this rank's tensors, and runs the composed copies itself.

It also encodes weights itself, if rows of all codes have places in its memory. This process would have to make the
codes in a buffer, and to wait until the engine has copied them. If all ranks of a replica are on one machine, the
engine's process opens the tensors of all of them.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mcore_bridge.errors import ExportError, TransferError, describe, grouped_by_rank
from mcore_bridge.rules.spec import Pair, TensorSpec
from mcore_bridge.weights.agreement import Export, with_codes
from mcore_bridge.weights.engine.across_ranks import AcrossRanks, MoreHandles, digest_of
from mcore_bridge.weights.engine.composed import EngineOutputs, EngineProgram, EngineStep, MapWriter
from mcore_bridge.weights.ipc.shared_memory import Handle, allocate, share, share_part
from mcore_bridge.weights.plan.boxes import ByteCopy, placed_rows, through
from mcore_bridge.weights.plan.engine_map import EngineMap
from mcore_bridge.weights.sent.encoding import is_by_kernel
from mcore_bridge.weights.transfer.collectives import Group
from mcore_bridge.weights.transfer.copier import (
    MOST_ALLOCATIONS,
    AllocationLayout,
    Allocations,
    Buffers,
    CopyTable,
    PlacedMaker,
    whole_of,
)
from mcore_bridge.weights.transfer.endpoints import Maker, Sources
from mcore_bridge.weights.transfer.failures import any_of_ranks, raise_on_all

MOST_CAST_BYTES = 64 << 20
"""Bytes of HF tensors which the map casts. They travel as bytes of a message."""
_MESSAGES = -1
"""The number of the sender if ranks exchange messages, which all come through one rank. Else it is a rank."""


class Dialogue(Protocol):
    """Questions to the worker of an engine, which answers them in their order."""

    def send(self, method: str, arguments: Sequence[Any] = ()) -> None:
        """Ask for a method of the worker."""

    def answer(self) -> Any:
        """The next answer; raises ``TransferError`` if the worker failed, at once if it was silent or has ended."""


class _Staged(NamedTuple):
    """A step of which some copies read tensors that were made for this round. These go through a staging buffer.

    Attributes:
        others: the step without these copies.
        into, out_of: the copies into the staging buffer, and out of it into the engine's tensors.
        num_bytes: the size of the buffer.
    """

    others: EngineStep
    into: CopyTable
    out_of: CopyTable
    num_bytes: int

    @classmethod
    def of(cls, step: EngineStep, made: frozenset[int], program: EngineProgram) -> _Staged:
        """The parts of a step.

        Args:
            made: the numbers of the tensors that were made.
            program: the program of the step.
        """
        others = replace(step, composed=tuple(copy for copy in step.composed if copy.source not in made))
        first = len(program.names)  # the number of the first buffer behind this rank's tensors
        into, out_of, num_bytes = through((copy for copy in step.composed if copy.source in made), first)
        out_of = [copy._replace(source=first + len(program.map.tensors)) for copy in out_of]
        return cls(others, CopyTable(into), CopyTable(out_of), num_bytes)


class Offer(NamedTuple):
    """The memory of one rank in a round, for the engine's process that copies from it. It can be sent.

    Attributes:
        handles: of the allocations of the rank's tensors.
        layout: how the tensors of the export lie in them; None if this has not changed.
        makes: whether the engine's process makes codes and scales of them.
    """

    handles: list[Handle]
    layout: AllocationLayout | None
    makes: bool


class PullWriter(MapWriter):
    """Writes into one rank of an engine on the same machine, whose memory this process cannot open.

    While the engine copies, this rank checks the tensors of the next messages. It waits for answers where windows are
    used again, and at the end. What this process makes for a round, such as merged weights, goes through a staging
    buffer that the engine opens. An error of the engine does not stop an export, since other ranks take part:
    ``complete`` raises it.

    Args:
        engine_map: the engine's map.
        line: reaches a ``Puller`` of the engine.
    """

    def __init__(self, engine_map: EngineMap, line: Dialogue) -> None:
        super().__init__(engine_map)
        self._line = line
        self._num_due = 0
        """The number of answers that the engine has not given yet."""
        self.can_encode = False
        """Whether the engine's process has said that it can encode weights."""
        self._unplaced: object = None
        """Codes of which some have no place in the engine's memory."""
        self._error: Callable[[int, int], ExportError] | None = None
        """Makes an error of what the engine could not make."""
        self._makes = False
        """Whether the engine's process encodes in this round."""
        self._sent: tuple[EngineProgram, object] | None = None
        """The program and the format for which the engine can encode."""
        self._layout: AllocationLayout | None = None
        """How tensors lie in allocations, as the engine knows it."""
        self._numbers: dict[CopyTable, int] = {}
        """The number by which the engine has each table."""
        self._windows: dict[int, tuple[int, Tensor]] = {}
        """By its address, each allocation of windows that the engine has opened in this round, with its number."""
        self._unused = count()
        """Numbers for further allocations of windows."""
        self._staged: dict[tuple[EngineStep, frozenset[int]], _Staged] = {}
        """The parts of steps, by what was made for them."""
        self._staging: Tensor | None = None
        """The staging buffer. For the engine it is one more allocation of windows."""
        self._problem: TransferError | None = None
        self.known: object = object()
        """Stands for all that the engine has learned. After an error it is another object."""

    def announce(self) -> None:
        """Begin a round: the engine looks up its memory while the ranks of the trainer agree on a plan."""
        self._problem = None
        self._ask("pull_announce")

    def open(self, tensors: Iterable[Tensor]) -> list[Handle]:
        """Handles of the memory of this rank's tensors, for a trial.

        Raises:
            TransferError: when the engine should not pull: the tensors lie in too many allocations, another process
                cannot open them, or the map casts many values.
        """
        sources = {spec.name: spec for spec in self.map.sources}
        cast_bytes = sum(sources[name].num_bytes for name in {copy.hf for copy in self.map.copies if copy.casts})
        if cast_bytes > MOST_CAST_BYTES:
            raise TransferError(f"the engine's map casts HF tensors of {cast_bytes} bytes to another dtype")
        return _shared(Buffers([tensor.detach() for tensor in tensors]).allocations, self.map.digest)

    def begin(self, sources: Sources, device: torch.device) -> tuple[EngineProgram, EngineOutputs]:
        """See ``MapWriter``."""
        before, maker, self._makes = self.program, sources.maker, False
        program, outputs = super().begin(sources, device)
        if maker is not None and program.places and self._needs_others(program, maker):
            self._unplaced = maker.rows
            program, outputs = super().begin(sources, device)
        if program is not before:
            self._staged, self._numbers = {}, {}
        if maker is not None and program.places:
            if self._sent != (program, maker.form):
                encoder, self._error = maker.placed(program.places, program.copies_of_rank())
                self._ask("pull_make_by", _MESSAGES, encoder)
                self._sent = program, maker.form
            self._makes = True
            sources.leave_to_engine()
        return program, outputs

    def _needs_others(self, program: EngineProgram, maker: Maker) -> bool:
        """Whether the engine needs codes without places, or this process needs codes or scales for an HF tensor."""
        return 2 * len(program.places) < len(maker.numbers) or not maker.numbers.isdisjoint(program.whole)

    def _takes_rows(self, maker: Maker, device: torch.device) -> bool:
        return self.can_encode and maker.is_of_parameters and maker.rows is not self._unplaced

    def _place(self, program: EngineProgram, maker: Maker) -> None:
        """Nothing is written by this process."""

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        """Memory for windows that the engine's process can open."""
        return allocate(num_bytes, device)

    def take(self, step: EngineStep, held: Buffers, windows: Tensor) -> None:
        """See ``MapWriter``."""
        if not held.made:
            super().take(step, held, windows)
            return
        if (key := (step, held.made)) not in self._staged:
            assert self.program is not None
            self._staged[key] = _Staged.of(step, held.made, self.program)
        staged = self._staged[key]
        super().take(staged.others, held.plain, windows)
        if staged.num_bytes:
            staging = self._staging_of(staged.num_bytes, windows.device)
            staged.into.run(held, Buffers([staging]), windows.device)
            self._run(staged.out_of, staging)

    def _staging_of(self, num_bytes: int, device: torch.device) -> Tensor:
        """The staging buffer, with at least so many bytes."""
        if self._staging is None or self._staging.numel() < num_bytes:
            if self._staging is not None:
                self._windows.pop(self._staging.data_ptr(), None)
            self._staging = self.allocate(num_bytes, device)
        return self._staging

    def _hold(self, held: Buffers) -> None:
        allocations, self._windows = held.allocations, {}
        layout = None if allocations.layout == self._layout else allocations.layout
        self._layout = allocations.layout
        _synchronize(held)
        try:
            handles = _shared(allocations, self.map.digest)
        except TransferError as error:
            self._problem = self._problem or error
            return
        self._ask("pull_begin", _MESSAGES, handles, layout)
        if self._makes:
            self._ask("pull_make", _MESSAGES)

    def _run(self, table: CopyTable, windows: Tensor) -> None:
        number, rows, place, handle = self._numbers.get(table), None, -1, None
        if number is None:
            number, rows = len(self._numbers), table.table
            self._numbers[table] = number
        if windows.numel():
            if windows.data_ptr() not in self._windows:
                self._windows[windows.data_ptr()] = next(self._unused), windows
                handle = share_part(whole_of(windows), self.map.digest)
            place, _ = self._windows[windows.data_ptr()]
            _synchronize(Buffers([windows]))
        self._ask("pull_copy", _MESSAGES, number, rows, place, handle)
        if windows.numel():
            self._take_answers()

    def write_group(self, group: Sequence[Pair]) -> None:
        """See ``MapWriter``."""
        self._ask("pull_write", [(TensorSpec.of(name, t), _bytes_of(t)) for name, t in group])

    def _ask(self, method: str, *arguments: Any) -> None:
        if self._problem is None:
            try:
                self._line.send(method, arguments)
                self._num_due += 1
            except TransferError as error:
                self._problem = error

    def _take_answers(self) -> Any:
        """Wait for all answers; the last one, unless the engine has failed."""
        answer = None
        while self._num_due:
            self._num_due -= 1
            try:
                answer = self._line.answer()
            except TransferError as error:
                self._problem = self._problem or error
        return None if self._problem else answer

    def has_failed(self) -> bool:
        """Whether the engine has failed in this round, once it has done all that it was asked for."""
        self._take_answers()
        return self._problem is not None

    def learn(self, sender: int, handle: Handle) -> None:
        """Let the engine's process learn what a rank has written for it."""
        self._ask("pull_learn", sender, handle)

    def open_tensors(self, sender: int, offer: Offer) -> None:
        """Let the engine's process open the memory of a rank."""
        self._makes = False
        self._ask("pull_begin", sender, offer.handles, offer.layout)

    def tried(self) -> str:
        """What went wrong in what the engine was asked for, which it need not have done."""
        self._take_answers()
        problem, self._problem = self._problem, None
        return "" if problem is None else str(problem)

    def copy_from(self, sender: int, offer: Offer) -> None:
        """Let the engine's process encode the weights of a rank and copy the others."""
        if offer.makes:
            self._ask("pull_make", sender)
        self._ask("pull_copy", sender, 0, None, -1, None)

    def done(self) -> dict[int, tuple[int, int]]:
        """Wait until the engine has everything; what it could not make, by senders. ``complete`` raises its errors."""
        self._ask("pull_done")
        return self._take_answers() or {}

    def complete(self) -> None:
        """Raise what the engine has reported in this round."""
        if self._makes:
            self._ask("pull_done")
        wrong = self._take_answers()
        self._windows.clear()
        if self._problem is not None:  # questions were left out, so nobody knows what the engine has
            self._forget()
            raise self._problem
        if self._makes and wrong:
            assert self._error is not None
            raise self._error(*wrong[_MESSAGES])

    def _forget(self) -> None:
        """Forget what the engine knows."""
        self._sent, self._layout, self._numbers, self.known = None, None, {}, object()

    def let_go(self) -> None:
        """See ``MapWriter``."""
        super().let_go()
        self._staging = None
        self._windows.clear()

    def close(self) -> None:
        """See ``MapWriter``."""
        super().close()
        self._forget()
        self._staged, self._error = {}, None


class PulledByWorkers(AcrossRanks):
    """Each worker copies from the tensors of all ranks, and encodes their weights itself.

    What a rank has for a worker passes through the rank that has the connection to it. Tables are large. So they are in
    memory of the host, which the worker opens.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: tuple[object, object] | None = None
        """What all workers have learned: by the writer of this rank, and the format."""
        self._layout: AllocationLayout | None = None
        """How the tensors of this rank lie in allocations, as all workers know it."""
        self._errors: dict[int, Callable[[int, int], ExportError]] = {}
        """For the workers that encode weights of this rank, by their ranks: makes an error of what went wrong."""

    def forget(self) -> None:
        """See ``AcrossRanks``."""
        self._known = self._layout = None
        self._errors = {}

    def run(self, export: Export, reached: Callable[[], MapWriter | None], more_handles: MoreHandles | None) -> bool:
        """See ``AcrossRanks``."""
        group, held, is_possible, problem = export.group, None, False, ""
        writer: PullWriter | None = None
        known: tuple[object, object] | None = None
        try:
            worker = reached()
            assert worker is None or isinstance(worker, PullWriter)
            writer, known = worker, (None if worker is None else worker.known, export.format)
            held = Sources(export.program, export.held).parameters.at(export.program.made_of)
            is_well = writer is None or not writer.has_failed()
            is_possible = is_well and not export.held.merges and is_by_kernel(export.program, export.held)
        except Exception as error:
            problem = describe(error)
        are_impossible, is_new = any_of_ranks(group, problem, [not is_possible, known != self._known])
        if are_impossible:
            return False
        assert held is not None
        if is_new:
            self.forget()
            if not self._teach(with_codes(export), writer):
                return False
            self._known = known
        offers = self._offered(export, held, writer)
        if offers is None:
            return False
        self._take_copies(group, writer, offers)
        return True

    def _teach(self, export: Export, writer: PullWriter | None) -> bool:
        """Let all workers learn what they copy and make in each round; whether they can."""
        group, maker, problem = export.group, export.held.maker, ""
        written: list[Tensor] = []
        lessons: dict[int, Handle] = {}
        try:
            if export.format.is_encoded and writer is not None and not writer.can_encode:
                raise TransferError("a worker cannot encode weights")
            for receiver, copies in self.copies.items():
                left, encoder = self._left_to(receiver, copies, maker, len(export.program.names))
                octets = pickle.dumps((CopyTable(left).table, encoder))
                written.append(allocate(len(octets), torch.device("cpu")))
                written[-1].copy_(torch.frombuffer(bytearray(octets), dtype=torch.uint8))
                lessons[receiver] = share(written[-1], digest_of(export, receiver))
        except Exception as error:
            problem = describe(error)
        of_ranks = group.all_gather_object((lessons, problem))
        if writer is not None and not any(text for _, text in of_ranks):
            for sender, (of_rank, _) in enumerate(of_ranks):
                if group.rank in of_rank:
                    writer.learn(sender, of_rank[group.rank])
            problem = writer.tried()
        return self._all_can(group, problem)

    def _left_to(
        self, receiver: int, copies: Sequence[ByteCopy], maker: Maker | None, first: int
    ) -> tuple[Sequence[ByteCopy], PlacedMaker | None]:
        """The copies that are left to a worker when it makes codes and scales, and what makes them.

        Args:
            first: the number of its first tensor.

        Raises:
            TransferError: when it cannot make all that it needs.
        """
        needed = frozenset[int]() if maker is None else maker.numbers & {copy.source for copy in copies}
        if maker is None or not needed:
            return copies, None
        places = placed_rows(copies, {number: maker.rows[number] for number in needed & maker.rows.keys()}, first)
        encoder, self._errors[receiver] = maker.placed(places, copies)
        if needed - encoder.numbers:
            raise TransferError("a worker keeps codes in another order, or cuts their blocks, so this rank makes them")
        return [copy for copy in copies if copy.source not in places], encoder

    def _all_can(self, group: Group, problem: str) -> bool:
        """Whether no rank has a problem. Otherwise rounds of this program go by messages from now on."""
        if group.all_true(not problem):
            return True
        self.problem = grouped_by_rank(group.all_gather_object(problem))
        self.forget()
        self.fits = False
        return False

    def _offered(self, export: Export, held: Buffers, writer: PullWriter | None) -> dict[int, Offer] | None:
        """What ranks offer to the worker of this rank, which has opened their memory; None if any worker cannot."""
        group, offers, problem = export.group, dict[int, Offer](), ""
        try:
            layout = None if held.allocations.layout == self._layout else held.allocations.layout
            self._layout = held.allocations.layout
            _synchronize(held)
            for receiver in self.copies:
                handles = _shared(held.allocations, digest_of(export, receiver))
                offers[receiver] = Offer(handles, layout, receiver in self._errors)
        except Exception as error:
            problem = describe(error)
        of_ranks = group.all_gather_object(offers)
        due = {sender: of_rank[group.rank] for sender, of_rank in enumerate(of_ranks) if group.rank in of_rank}
        if writer is not None:
            for sender, offer in due.items():
                writer.open_tensors(sender, offer)
            opened = writer.tried()
            problem = problem or opened
        return due if self._all_can(group, problem) else None

    def _take_copies(self, group: Group, writer: PullWriter | None, offers: Mapping[int, Offer]) -> None:
        """Let the worker of this rank copy, and wait until all workers have copied.

        Raises:
            ExportError: on every rank, when a weight could not be encoded.
        """
        wrong, problem = dict[int, tuple[int, int]](), ""
        try:
            if writer is not None:
                for sender, offer in offers.items():
                    writer.copy_from(sender, offer)
                wrong = writer.done()
        except Exception as error:
            problem = describe(error)
        of_workers = group.all_gather_object((wrong, problem))
        if any(own or text for own, text in of_workers):
            with raise_on_all(group, kind=ExportError):
                mine = [(rank, own[group.rank]) for rank, (own, _) in enumerate(of_workers) if group.rank in own]
                texts = [describe(self._errors[rank](*what)) for rank, what in mine]
                if texts or problem:
                    raise ExportError("; ".join(dict.fromkeys(filter(None, [*texts, problem]))))


def _shared(allocations: Allocations, digest: str) -> list[Handle]:
    """Handles of all allocations for one process.

    Raises:
        TransferError: when they are too many, or when another process cannot open one.
    """
    if len(allocations.wholes) > MOST_ALLOCATIONS:
        raise TransferError(
            f"expected weights in at most {MOST_ALLOCATIONS} allocations, as megatron-core's DDP makes them for "
            "its distributed optimizer, found more"
        )
    return [share_part(whole, digest) for whole in allocations.wholes]


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()


def _synchronize(buffers: Buffers) -> None:
    """Wait for all that this process has queued on GPUs with buffers: another process reads them now."""
    for index in buffers.gpus:
        torch.cuda.current_stream(index).synchronize()
