"""Runs a program: while the tensors of one message are yielded, the next two messages travel.

A rank that stops early keeps sending until all have stopped. A rank that fails makes every rank of its group raise. The
state of a rank travels with its windows, so other ranks get it at most three messages later. At the end, a collective
checks whether all ranks arrived without a failure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing

import torch
from torch import Tensor

from mcore_bridge.errors import ExportError
from mcore_bridge.weights.plan.export_plan import MESSAGES_IN_FLIGHT, Message
from mcore_bridge.weights.transfer.collectives import Group
from mcore_bridge.weights.transfer.copier import Buffers
from mcore_bridge.weights.transfer.endpoints import Held, Outputs, Sources
from mcore_bridge.weights.transfer.failures import raise_failures, raise_on_all, require_all
from mcore_bridge.weights.transfer.program import OUTPUTS, Program, Step
from mcore_bridge.weights.transfer.windows import Memory, State, Windows

Pairs = Iterator[tuple[str, Tensor]]
Ends = tuple[Program, Outputs]
"""The program of this rank, and its outputs."""


def new_tensors(sources: Sources, device: torch.device) -> Ends:
    """The usual end of an export: HF tensors that are allocated before the first write to them."""
    return sources.program, Outputs(sources.program.plan, device)


def run_program(
    program: Program,
    group: Group,
    held: Held,
    *,
    lend: bool = False,
) -> Generator[tuple[str, Tensor], None, None]:
    """Yield every HF tensor of ``program``, ready on the current stream: ``run_messages``, one tensor at a time."""
    with closing(run_messages(program, group, held, lend=lend)) as messages:
        for pairs in messages:
            yield from pairs


def run_messages(
    program: Program,
    group: Group,
    held: Held,
    *,
    lend: bool = False,
    into: Callable[[Sources, torch.device], Ends] = new_tensors,
) -> Generator[Pairs, None, None]:
    """Yield an iterator for each message, over the HF tensors that it completes. Exhaust it before the next message.

    Every rank gets equally many iterators, so their number shows the progress of all ranks.

    Args:
        held: what this rank sends.
        lend: yield tensors that lie whole in the windows as views, valid until the next step of the iterator. All other
            tensors are new and belong to the caller. While it reads views, one message less is in flight.
        into: makes the program and the outputs of this rank, from its sources and the device of the group.

    Raises:
        ExportError: on every rank of the group, when any rank fails. The error names the rank and the parameter.
    """
    if group.size == 1:
        sources = Sources(program, held)  # before a receiver has to be ready
        try:
            for number, pairs in enumerate(run_alone(*into(sources, group.device), sources.read_by, group.device)):
                sources.passed(number)
                yield pairs
        finally:  # the consumer may have stopped with codes that the GPU was still making
            sources.check(waits=True)
        return
    exchange = None
    with raise_on_all(group, kind=ExportError):  # such as out of memory: other ranks must be informed before they wait
        sources = Sources(program, held)
        exchange = _Exchange(*into(sources, group.device), group, sources, lend=lend)
    assert exchange is not None
    yield from exchange.messages()


def exhaust(messages: Iterable[Iterable[tuple[str, Tensor]]]) -> None:
    """Run messages to their end, for an end that yields nothing of use."""
    for pairs in messages:
        for _ in pairs:
            pass


def run_alone(
    program: Program, outputs: Outputs, read: Callable[[Step], Buffers], device: torch.device
) -> Iterator[Pairs]:
    """``run_messages`` for a rank whose group has no other ranks.

    Args:
        read: from a step to this rank's tensors.
    """
    nothing = [torch.empty(0, device=device)] * OUTPUTS
    for number, message in enumerate(program.plan.messages):
        step = program.step(number, None)
        outputs.run(step, read(step), nothing, device)
        yield outputs.closed(message)


class _Exchange:
    """One run of a program in a group."""

    def __init__(self, program: Program, outputs: Outputs, group: Group, held: Sources, *, lend: bool) -> None:
        self._program, self._group, self._lends = program, group, lend
        self._messages = program.plan.messages
        self._held = held
        self._outputs = outputs
        self._nothing = torch.empty(0, device=group.device)
        self._memory = [
            Memory(group, program.room(number), outputs.allocate)
            for number in range(min(MESSAGES_IN_FLIGHT, len(self._messages)))
        ]
        self._spare: list[Memory] = []
        self._sent: deque[Windows] = deque()
        self._arrived: Windows | None = None
        self._closed = False
        self._failure: ExportError | None = None
        first = self._following(0)
        first.read_headers()  # now, while a rank that cannot copy bytes at all can still report it
        self._steps(None, first)
        self._sent.append(first)

    def messages(self) -> Generator[Pairs, None, None]:
        """See ``run_messages``."""
        try:
            self._sent[0].send()
            for number in range(1, len(self._memory)):
                self._advance(None, number)
            for number, message in enumerate(self._messages):
                windows = self._arrived = self._sent.popleft()
                windows.wait()
                self._advance(windows, None if self._lends else number + MESSAGES_IN_FLIGHT)
                all_closed, failures = windows.states()
                self._check(number)
                ends = all_closed or any(failures)
                try:
                    if not (ends or self._closed or self._failure):
                        yield self._yielded(message)
                except GeneratorExit:
                    self._closed = True
                if self._lends:  # the caller has read the views of these windows
                    self._advance(None, number + MESSAGES_IN_FLIGHT)
                raise_failures(failures)
                if ends:
                    break
        finally:
            for windows in self._sent:  # the same messages on every rank, since all ranks read equal states
                windows.wait()
        self._check(len(self._messages) - 1, waits=True)
        require_all(self._group, str(self._failure or ""))  # no window was left to carry the state

    def _check(self, number: int, *, waits: bool = False) -> None:
        """Fail if a number could not be encoded.

        When a message has arrived, the launches are done that encode what this rank sends with this message.

        Args:
            number: the message.
            waits: as for ``Sources.check``.
        """
        try:
            self._held.check(waits=waits)
        except ExportError as problem:
            self._fail(problem, number)

    def _yielded(self, message: Message) -> Pairs:
        """Yield the tensors that a message completes. If the consumer throws an error into this, all ranks fail."""
        try:
            yield from self._outputs.closed(message)
        except Exception as problem:
            self._fail(problem, message.number)

    def _advance(self, arrived: Windows | None, number: int | None) -> None:
        """Unpack the windows that have ``arrived``, and send message ``number`` if there is one."""
        number = number if number is not None and number < len(self._messages) else None
        if number is not None and self._memory[number % MESSAGES_IN_FLIGHT].room != self._program.room(number):
            if arrived:
                self._advance(arrived, None)
                arrived = None
            self._take_other_memory(number)
        following = self._following(number) if number is not None else None
        try:
            self._steps(arrived, following)
        except Exception as problem:  # any error: the other ranks are waiting for this window
            windows = following or arrived
            assert windows is not None
            self._fail(problem, windows.number)
            self._steps(arrived, following)
        if following:
            following.send()
            self._sent.append(following)

    def _take_other_memory(self, number: int) -> None:
        """Replace the memory of a message by memory of another size. All ranks do so at once, or fail together."""
        assert self._arrived is not None
        self._arrived.leave()
        room = self._program.room(number)
        if not (self._spare and self._spare[-1].room == room):
            with raise_on_all(self._group, kind=ExportError):
                self._spare = [Memory(self._group, room, self._outputs.allocate) for _ in range(MESSAGES_IN_FLIGHT)]
        self._memory[number % MESSAGES_IN_FLIGHT] = self._spare.pop()

    def _following(self, number: int) -> Windows:
        program = self._program
        sizes = program.received(number), program.sent(number)
        memory, lineup = self._memory[number % MESSAGES_IN_FLIGHT], program.lineup(number)
        return Windows(self._group, memory, number, *sizes, lineup, program.headers(number))

    def _steps(self, arrived: Windows | None, following: Windows | None) -> None:
        """Unpack and pack in one step, unless this rank's next window overlaps windows that other ranks have sent.

        Headers are read first.
        """
        if arrived:
            arrived.read_headers()
        if arrived and following and following.overlaps(arrived):
            self._step(arrived, None)
            self._step(None, following)
        elif arrived or following:
            self._step(arrived, following)

    def _step(self, arrived: Windows | None, following: Windows | None) -> None:
        unpack, pack = not (self._closed or self._failure), not self._failure
        numbers = arrived.number if arrived else None, following.number if following else None
        step = self._program.step(*numbers, unpack=unpack, pack=pack, lend=self._lends)
        if not unpack:
            self._outputs.clear()
        state = State.FAILED if self._failure else State.CLOSED if self._closed else State.CONSUMING
        passing = [
            arrived.all if arrived else self._nothing,
            following.stamped(state, str(self._failure or "")) if following else self._nothing,
            following.own if following else self._nothing,
        ]
        self._outputs.run(step, self._held.read_by(step), passing, self._group.device)
        if arrived:
            self._held.passed(arrived.number)
            self._outputs.lend(step, arrived.all)

    def _fail(self, problem: Exception, number: int) -> None:
        entries = self._program.plan.payload.entries
        names = [entries[piece.entry].held.name for piece in self._messages[number].pieces]
        where = f"in the message of {names[0]} to {names[-1]}" if names else "in a message for other ranks"
        self._failure = ExportError(f"{type(problem).__name__} {where}: {problem}")
