"""The one module that communicates: agree on a flag, exchange descriptions, gather windows of bytes.

Every window carries a header with its sender's state, so that a rank that failed or stopped consuming tells the others
without a collective of its own, and nobody is left waiting.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, TypeVar

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


@dataclass(frozen=True, slots=True)
class Gathered:
    """The windows of all ranks of a group, uint8 [size of the group, bytes], and what each said of itself."""

    windows: Tensor
    states: tuple[State, ...]
    messages: tuple[str, ...]


class Group:
    """A process group with the four things that an export does in it. Ranks are ranks of the group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group if group is not None else dist.group.WORLD
        self.rank = dist.get_rank(self._group)
        self.size = dist.get_world_size(self._group)
        self.device = self._device()

    def _device(self) -> torch.device:
        if "nccl" in str(dist.get_backend(self._group)):
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
            dist.all_reduce(answer, dist.ReduceOp.MAX, group=self._group)
        return bool(answer.item())

    def exchange(self, value: T) -> list[T]:
        """The ``value`` of every rank, pickled on the way."""
        if self.size == 1:
            return [value]
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values  # type: ignore[return-value]  # filled by the call

    def window(self, num_bytes: int) -> Tensor:
        """A window of ``num_bytes`` bytes, header included, to be filled and gathered."""
        return torch.empty(HEADER + num_bytes, dtype=torch.uint8, device=self.device)

    def body(self, window: Tensor) -> Tensor:
        """The part of a window that is the caller's to fill."""
        return window[HEADER:]

    def gather(self, window: Tensor, state: State, message: str = "") -> Gathered:
        """Send this rank's window with its state, and receive everybody's."""
        text = message.encode()[: HEADER - 1]
        header = torch.frombuffer(bytearray([state, *text.ljust(HEADER - 1, b"\0")]), dtype=torch.uint8)
        window[:HEADER].copy_(header)
        gathered = torch.empty(self.size * len(window), dtype=torch.uint8, device=self.device)
        dist.all_gather_into_tensor(gathered, window, group=self._group)
        windows = gathered.view(self.size, len(window))
        headers = [bytes(row.tolist()) for row in windows[:, :HEADER].cpu()]
        return Gathered(
            windows[:, HEADER:],
            tuple(State(header[0]) for header in headers),
            tuple(header[1:].rstrip(b"\0").decode(errors="replace") for header in headers),
        )
