"""The one module that communicates: agree on a flag, exchange descriptions, gather windows of bytes.

Every window carries a header with its sender's state, so that a rank that failed or stopped consuming tells the others
without a collective of its own, and nobody is left waiting.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_bridge.config.mesh.lost_ranks import naming_lost_ranks, note_process
from mcore_bridge.weights.plan.stream import HEADER
from mcore_bridge.weights.transfer.window_order import FLAT, Lineup

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

T = TypeVar("T")
MODULUS = 1 << 40
"""Of numbers that are added up: those of millions of ranks are an int64."""


class State(IntEnum):
    """What a rank says with each window: it takes what it gets, it only sends for the others, or it failed.

    Behind it in the header, a message in UTF-8 is padded with zeros.
    """

    CONSUMING = 0
    CLOSED = 1
    FAILED = 2


class Windows:
    """One message on its way: this rank's windows, and room for those of all ranks of a group.

    Windows that were sent arrive behind the back of the caller, and have arrived for all that is enqueued on the
    current stream after ``wait``.

    Args:
        number: of the message.
        received: bytes of the window of each rank.
        sent: bytes of this rank's window for each of them; of one alone, if that one is for all.
        lineup: where the windows received lie.
    """

    def __init__(
        self, group: Group, memory: Memory, number: int, received: Sequence[int], sent: Sequence[int], lineup: Lineup
    ) -> None:
        self._group, self._memory, self._received, self._sent = group, memory, received, sent
        self._columns = lineup.columns
        self.number = number
        self.headers = memory.headers
        """Where the headers of all windows are to be copied, for ``states``: uint8 [ranks, HEADER], on the host."""
        start = lineup.starts[group.rank]
        self.all = memory.all[: sum(received)]
        """The windows of all ranks, lined up."""
        self.own = memory.own[: sum(sent)] if len(sent) > 1 else self.all[start : start + sent[0]]
        """This rank's windows: among those of all ranks, where one is for all of them."""
        self._own_state = State.CONSUMING, ""
        self._works: list[Any] = []

    def lies_upon(self, other: Windows) -> bool:
        """Whether this rank's windows are where another message has those of other ranks."""
        return len(self._sent) == 1 and self._received != other._received

    @naming_lost_ranks("sending windows of weights")
    def send(self) -> None:
        """Send this rank's windows, and begin to receive everybody's."""
        group = self._group
        if len(self._sent) > 1:
            sizes = [*self._received], [*self._sent]
            self._works = [dist.all_to_all_single(self.all, self.own, *sizes, group=group.group, async_op=True)]
        else:
            self._works = group.gather_windows(self.all, self.own, self._received, self._columns)

    @naming_lost_ranks("receiving windows of weights")
    def wait(self) -> None:
        """Make the current stream wait for all windows."""
        while self._works:  # which hold on to the memory
            self._works.pop().wait()

    def leave(self) -> None:
        """Let go of the memory, when all that was in the windows is unpacked."""
        self.all = self.own = self._memory.all = self._memory.own = self.all.new_empty(0)

    def mark(self) -> None:
        """What is enqueued by now is what ``states`` waits for."""
        if self._memory.arrived is not None:
            self._memory.arrived.record()

    def stamped(self, state: State, message: str = "") -> Tensor:
        """What to write into this rank's header, so that others learn its state."""
        self._own_state = state, message
        return self._group.header(state, message)

    def said(self) -> tuple[bool, list[str]]:
        """Whether all ranks only send, and what each rank that failed says of it, as it stands in ``headers``."""
        if self._memory.arrived is not None:
            self._memory.arrived.synchronize()
        headers, own = self.headers.numpy(), self._group.rank
        states = bytearray(headers[:, 0].tobytes())  # of thousands of ranks, with each message
        states[own], message = self._own_state  # as it was stamped: its row may be written by now
        failures = [""] * len(states)
        if State(max(states)) is State.FAILED:
            for rank in (rank for rank, state in enumerate(states) if state == State.FAILED):
                failures[rank] = message if rank == own else _message(headers[rank].tobytes())
        return set(states) == {State.CLOSED}, failures


def _message(header: bytes) -> str:
    return header[1:].rstrip(b"\0").decode(errors="replace")


def _gather(group: dist.ProcessGroup | None, whole: Tensor, own: Tensor, widths: Sequence[int]) -> list[Any]:
    """Begin to gather windows, one behind the other in ``whole``, where this rank's ``own`` lies at its place."""
    if len({*widths}) == 1:
        return [dist.all_gather_into_tensor(whole, own, group=group, async_op=True)]
    windows = whole.split([*widths])
    if whole.is_cuda:
        return [dist.all_gather([*windows], own, group=group, async_op=True)]
    pairs = zip(dist.get_process_group_ranks(group), windows, strict=True)  # gloo gathers what is alike alone
    return [dist.broadcast(each, rank, group=group, async_op=True) for rank, each in pairs]


def _wait(works: Iterable[Any]) -> None:
    for work in works:
        work.wait()


class Memory:
    """What messages take, one after the other: so many bytes received, and sent if not from among them."""

    def __init__(self, group: Group, received: int, sent: int) -> None:
        on_gpu = group.device.type == "cuda"
        self.room = received, sent
        self.all = torch.empty(received, dtype=torch.uint8, device=group.device)
        self.own = torch.empty(sent, dtype=torch.uint8, device=group.device)
        self.headers = torch.empty((group.size, HEADER), dtype=torch.uint8, pin_memory=on_gpu)
        self.arrived = torch.cuda.Event() if on_gpu else None


class Group:
    """A process group with the things that an export does in it. Ranks are ranks of the group."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        column: dist.ProcessGroup | None = None,
        stage: dist.ProcessGroup | None = None,
    ) -> None:
        """Wrap a group; of one of many pipeline stages, also its ranks at this rank's place, and those of its stage."""
        note_process()
        self.group = group if group is not None else dist.group.WORLD
        self.rank = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)
        self.members = dist.get_process_group_ranks(self.group)
        """Their ranks in the world."""
        self.device = self._device()
        self._grid = (column, stage) if column and stage and self._are_grid(column, stage) else None
        self._stream = torch.cuda.Stream() if self._grid and self.device.type == "cuda" else None
        self._headers: dict[tuple[State, str], Tensor] = {}

    def _device(self) -> torch.device:
        if "nccl" in str(dist.get_backend(self.group)):
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    @classmethod
    def of_replica(cls, groups: ProcessGroupCollection) -> Group:
        """The smallest group with a whole model: dense parameters lie within ``mp``, experts within ``tp_ep_pp``.

        Decided by sizes, which all ranks have in common: where neither divides the other, some ranks of the one group
        would be all within the other and some not, and only the world is the same for all of them.
        """
        dense, experts = groups.mp.size(), groups.tp_ep_pp.size()
        if dense % experts == 0:
            return cls(groups.mp, column=groups.pp, stage=groups.tp)
        if experts % dense == 0:
            return cls(groups.tp_ep_pp, column=groups.pp, stage=getattr(groups, "tp_ep", None))
        return cls(None)

    @classmethod
    def across_replicas(cls, groups: ProcessGroupCollection) -> Group:
        """The ranks at this one's place in all replicas, as ``of_replica`` has them."""
        dense, experts = groups.mp.size(), groups.tp_ep_pp.size()
        if dense % experts == 0:
            return cls(groups.dp_cp)
        return cls(groups.expt_dp if experts % dense == 0 else None)

    def _are_grid(self, column: dist.ProcessGroup, stage: dist.ProcessGroup) -> bool:
        """Whether there are many ranks, stage by stage, each as many as ``stage``, through which ``column`` leads."""
        if min(column.size(), stage.size()) == 1 or not self.size == column.size() * stage.size() > FLAT:
            return False
        row, place = divmod(self.rank, stage.size())
        in_column, in_stage = (dist.get_process_group_ranks(each) for each in (column, stage))
        return (
            self.members[place :: stage.size()] == in_column
            and self.members[row * stage.size() :][: stage.size()] == in_stage
        )

    @property
    def num_stages(self) -> int:
        """Pipeline stages by which windows that are not alike travel in two steps; 1 is in one step."""
        return self._grid[0].size() if self._grid else 1

    def gather_windows(self, whole: Tensor, own: Tensor, widths: Sequence[int], columns: Sequence[int]) -> list[Any]:
        """Begin to gather windows, which lie in ``whole`` one behind the other, or column by column.

        Those of columns first go to this rank's column, and then with all others of that to its stage. On a GPU, what
        several communicators do is enqueued on a stream of its own, one after the other.
        """
        if self._grid is None:
            return _gather(self.group, whole, own, widths)
        column, stage = self._grid
        with self._beside_current():
            if columns:
                place = dist.get_rank(stage)
                mine = whole.split([*columns])[place]
                _wait(_gather(column, mine, own, widths[place :: stage.size()]))
                works = _gather(stage, whole, mine, columns)
            else:
                works = _gather(self.group, whole, own, widths)
            if self._stream is not None:
                _wait(works)
        return works

    @contextmanager
    def _beside_current(self) -> Iterator[None]:
        """On a stream of its own, behind what is enqueued on the current one by now."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def all_true(self, is_well: bool) -> bool:
        """Whether it is so on every rank: the small collective with which an export begins and ends."""
        return not self._most([not is_well])[0]

    def first_in_common(self, fits: Sequence[bool], count: int, version: int) -> int | None:
        """The first of ``count`` places that fits on every rank; None where none does, or versions differ."""
        misfits = [*(int(not fit) for fit in fits), *[1] * (count - len(fits))]
        *misfits, largest, negated = self._most([*misfits, version, -version])
        return misfits.index(0) if 0 in misfits and largest == -negated else None

    def _most(self, numbers: Sequence[int]) -> list[int]:
        """The largest that any rank has of each number."""
        return self._together(numbers, dist.ReduceOp.MAX)

    @naming_lost_ranks("agreeing with other ranks")
    def _together(self, numbers: Sequence[int], operation: dist.ReduceOp.RedOpType) -> list[int]:
        """What becomes of each number and those that other ranks have in its place."""
        if self.size == 1:
            return list(map(int, numbers))
        with self._beside_current():
            found = torch.tensor(numbers, dtype=torch.int64, device=self.device)
            dist.all_reduce(found, operation, group=self.group)
            return [int(number) for number in found.tolist()]

    def max(self, number: int) -> int:
        """The largest of the numbers that the ranks have."""
        return self._most([number])[0]

    def sums_to_zero(self, number: int) -> bool:
        """Whether the numbers that the ranks have are 0 together, but for multiples of ``MODULUS``."""
        return self._together([number % MODULUS], dist.ReduceOp.SUM)[0] % MODULUS == 0

    @naming_lost_ranks("gathering a tensor")
    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensor of every rank; all are of one shape and dtype, and new ones."""
        found = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in self.members]
        dist.all_gather(found, tensor.contiguous(), group=self.group)
        return found

    @naming_lost_ranks("spreading a tensor")
    def broadcast(self, tensor: Tensor, rank: int) -> None:
        """Overwrite the tensor of every rank with that of one of them."""
        dist.broadcast(tensor, self.members[rank], group=self.group)

    @naming_lost_ranks("exchanging descriptions with other ranks")
    def all_gather_object(self, value: T) -> list[T]:
        """The ``value`` of every rank, pickled on the way."""
        if self.size == 1:
            return [value]
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values  # type: ignore[return-value]  # filled by the call

    def header(self, state: State, message: str = "") -> Tensor:
        """How a state and a message travel."""
        if (state, message) not in self._headers:  # nearly always the first state, which need not cross to a GPU twice
            text = message.encode()[: HEADER - 1]
            header = torch.frombuffer(bytearray([state, *text.ljust(HEADER - 1, b"\0")]), dtype=torch.uint8)
            self._headers[state, message] = header.to(self.device)
        return self._headers[state, message]
