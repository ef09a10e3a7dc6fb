"""The one module that communicates: agree on a flag, exchange descriptions, gather windows of bytes.

Every window carries a header with its sender's state, so that a rank that failed or stopped consuming tells the others
without a collective of its own, and nobody is left waiting.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

T = TypeVar("T")

HEADER = 1024  # bytes: the state, then a message in UTF-8, padded with zeros; a multiple of plan.ALIGNMENT


class State(IntEnum):
    """What a rank says with each window: it takes what it gets, it only sends for the others, or it failed."""

    CONSUMING = 0
    CLOSED = 1
    FAILED = 2


class Windows:
    """One message on its way: a window for each rank of a group, of which this rank fills its own.

    Windows that are ``sent`` are filled behind the back of the caller, and are complete for all that is enqueued on the
    current stream after ``wait``.
    """

    def __init__(self, group: Group, memory: Tensor, num_bytes: int) -> None:
        self._group = group
        self._rows = memory[: group.size * (HEADER + num_bytes)].view(group.size, HEADER + num_bytes)
        self._work: Any = None

    @property
    def own(self) -> Tensor:
        """This rank's window, to be filled: uint8 [num_bytes]."""
        return self._rows[self._group.rank, HEADER:]

    @property
    def bodies(self) -> list[Tensor]:
        """The windows of all ranks."""
        return list(self._rows[:, HEADER:].unbind())

    def send(self, state: State, message: str = "") -> None:
        """Send this rank's window with its state, and begin to receive everybody's."""
        own = self._rows[self._group.rank]
        own[:HEADER].copy_(self._group.header(state, message))
        self._work = dist.all_gather_into_tensor(self._rows.view(-1), own, group=self._group.group, async_op=True)

    def wait(self) -> Headers:
        """Make the current stream wait for all windows; what the ranks say can be read then."""
        self._work.wait()
        return Headers(self._rows[:, :HEADER])


class Headers:
    """What each rank said with its window."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows.to("cpu", non_blocking=True, copy=True)  # from a GPU, to pinned memory
        self._arrived = torch.cuda.Event() if rows.is_cuda else None
        if self._arrived is not None:
            self._arrived.record()

    def read(self) -> tuple[tuple[State, ...], tuple[str, ...]]:
        """States and messages by rank. Waits until they have arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        rows = [row.tobytes() for row in self._rows.numpy()]
        return (
            tuple(State(row[0]) for row in rows),
            tuple(row[1:].rstrip(b"\0").decode(errors="replace") for row in rows),
        )


class Group:
    """A process group with the things that an export does in it. Ranks are ranks of the group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group if group is not None else dist.group.WORLD
        self.rank = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)
        self.device = self._device()
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
            return cls(groups.mp)
        return cls(groups.tp_ep_pp if experts % dense == 0 else None)

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is set on any rank: the one small collective that every export starts with."""
        answer = torch.tensor([int(flag)], dtype=torch.int32, device=self.device)
        if self.size > 1:
            dist.all_reduce(answer, dist.ReduceOp.MAX, group=self.group)
        return bool(answer.item())

    def exchange(self, value: T) -> list[T]:
        """The ``value`` of every rank, pickled on the way."""
        if self.size == 1:
            return [value]
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values  # type: ignore[return-value]  # filled by the call

    def memory(self, num_bytes: int) -> Tensor:
        """Memory for windows of up to ``num_bytes`` each."""
        return torch.empty(self.size * (HEADER + num_bytes), dtype=torch.uint8, device=self.device)

    def header(self, state: State, message: str = "") -> Tensor:
        """How a state and a message travel."""
        if (state, message) not in self._headers:  # nearly always the first state, which need not cross to a GPU twice
            text = message.encode()[: HEADER - 1]
            header = torch.frombuffer(bytearray([state, *text.ljust(HEADER - 1, b"\0")]), dtype=torch.uint8)
            self._headers[state, message] = header.to(self.device)
        return self._headers[state, message]
