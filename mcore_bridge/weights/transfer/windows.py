"""The windows of bytes of the messages in flight, and the memory for them.

Every window carries a header with the state of its sender. So if a rank fails or stops consuming, the other ranks get
to know it without an extra collective, and no rank waits forever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mcore_bridge.config.mesh.lost_ranks import naming_lost_ranks
from mcore_bridge.weights.plan.stream import HEADER
from mcore_bridge.weights.transfer.copier import Buffers

if TYPE_CHECKING:
    from mcore_bridge.weights.transfer.collectives import Group, Lineup
    from mcore_bridge.weights.transfer.copier import CopyTable


NOTHING = Buffers([])


class State(IntEnum):
    """The state of a rank, the first byte of each header: it consumes, it only sends, or it has failed.

    The rest of the header is a message in UTF-8, padded with zeros.
    """

    CONSUMING = 0
    CLOSED = 1
    FAILED = 2


class Memory:
    """Memory for one message at a time: for received windows, and for sent windows if they need separate memory.

    Args:
        room: bytes of both.
        allocate: makes a tensor uint8 [bytes] on the device of the group.
    """

    def __init__(self, group: Group, room: tuple[int, int], allocate: Callable[[int], Tensor]) -> None:
        on_gpu = group.device.type == "cuda"
        self.room = room
        self.all, self.own = map(allocate, room)
        self.headers = torch.empty((group.size, HEADER), dtype=torch.uint8, pin_memory=on_gpu)
        self.arrived = torch.cuda.Event() if on_gpu else None
        self._stamps: dict[tuple[State, str], Tensor] = {}

    @cached_property
    def buffers(self) -> Buffers:
        """The buffers between which headers are copied. A kernel gets their addresses only once."""
        return Buffers([self.all, self.headers])

    def free(self) -> None:
        """Free the memory of windows."""
        self.all = self.own = self.all.new_empty(0)
        self.buffers = NOTHING

    def header(self, state: State, message: str) -> Tensor:
        """The header for a state and a message: uint8 [HEADER]."""
        if (state, message) not in self._stamps:  # nearly always CONSUMING, which is sent to a GPU only once
            text = message.encode()[: HEADER - 1]
            header = torch.frombuffer(bytearray([state, *text.ljust(HEADER - 1, b"\0")]), dtype=torch.uint8)
            self._stamps[state, message] = header.to(self.own.device)
        return self._stamps[state, message]


class Windows:
    """One message in flight: this rank's windows, and memory for the windows of all ranks of a group.

    Windows travel asynchronously. Work that is enqueued on the current stream after ``wait`` can read them.

    Args:
        number: the number of the message.
        received: bytes of the window of each rank.
        sent: bytes of this rank's window for each rank; one number if one window is for all.
        lineup: where the received windows lie.
        headers: copies their headers.
    """

    def __init__(
        self,
        group: Group,
        memory: Memory,
        number: int,
        received: Sequence[int],
        sent: Sequence[int],
        lineup: Lineup,
        headers: CopyTable,
    ) -> None:
        self._group, self._memory, self._received, self._sent = group, memory, received, sent
        self._columns, self._headers = lineup.columns, headers
        self.number = number
        start = lineup.starts[group.rank]
        self.all = memory.all[: sum(received)]
        """The windows of all ranks, lined up."""
        self.own = memory.own[: sum(sent)] if len(sent) > 1 else self.all[start : start + sent[0]]
        """This rank's windows. A single window for all ranks lies among the windows of all ranks."""
        self._own_state = State.CONSUMING, ""
        self._works: list[Any] = []

    def overlaps(self, other: Windows) -> bool:
        """Whether this rank's windows overlap the windows of other ranks in another message."""
        return len(self._sent) == 1 and self._received != other._received

    def send(self) -> None:
        """Send this rank's windows, and begin to receive the windows of all ranks."""
        if len(self._sent) > 1:
            self._works = self._group.exchange_windows(self.all, self.own, self._received, self._sent)
        else:
            self._works = self._group.gather_windows(self.all, self.own, self._received, self._columns)

    @naming_lost_ranks("receiving windows of weights")
    def wait(self) -> None:
        """Make the current stream wait for all windows."""
        while self._works:  # each work object keeps memory alive, so drop it
            self._works.pop().wait()

    def read_headers(self) -> None:
        """Begin to copy the headers to the host. ``states`` waits for this, and not until windows are unpacked."""
        memory, device = self._memory, self.all.device
        self._headers.run(memory.buffers, NOTHING, device)
        if memory.arrived is not None:
            memory.arrived.record(torch.cuda.current_stream(device))

    def leave(self) -> None:
        """Free the memory, after all windows are unpacked."""
        self.all = self.own = self.all.new_empty(0)
        self._memory.free()

    def stamped(self, state: State, message: str = "") -> Tensor:
        """The header with the state of this rank, for other ranks."""
        self._own_state = state, message
        return self._memory.header(state, message)

    def states(self) -> tuple[bool, list[str]]:
        """Whether all ranks only send, and the message of each rank that has failed, by their headers."""
        if self._memory.arrived is not None:
            self._memory.arrived.synchronize()
        headers, own = self._memory.headers.numpy(), self._group.rank
        states = bytearray(headers[:, 0].tobytes())  # from thousands of ranks, with each message
        states[own], message = self._own_state  # its row is never copied
        failures = [""] * len(states)
        if State(max(states)) is State.FAILED:
            for rank in (rank for rank, state in enumerate(states) if state == State.FAILED):
                text = headers[rank, 1:].tobytes().rstrip(b"\0").decode(errors="replace")
                failures[rank] = message if rank == own else text
        return set(states) == {State.CLOSED}, failures
