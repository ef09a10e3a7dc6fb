"""A process group of a trainer's replica and of workers of engines elsewhere. It stands beside torch's default group.

So no process has to be in a group of the other side, and engines may join, leave and die. If a worker dies, NCCL would
wait for it for good. So each process watches its connection to the other side, and a store that all of them share. The
one that finds a break breaks the group of all.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from threading import Event, Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_bridge.config.mesh.lost_ranks import naming_lost_ranks
from mcore_bridge.engines.channel import has_ended
from mcore_bridge.errors import TransferError
from mcore_bridge.weights.transfer.collectives import Group

_BROKEN = "broken"
_PAUSE = 0.05
"""Seconds between two looks at connections and at the store."""
_POLL = 0.0005
"""Seconds between two looks at a collective of gloo."""
_left: list[Any] = []
"""Groups of gloo that broke."""
_dist: Any = dist  # its stores are missing from torch's types
T = TypeVar("T")


def open_store(host: str, seconds: float, port: int = 0) -> Any:
    """The store at which all members find each other. One of them makes it, and the others get its ``port``."""
    return _dist.TCPStore(host, port, None, not port, timedelta(seconds=seconds), wait_for_workers=False)


def break_store(store: Any) -> None:
    """Let all members know that the group has broken."""
    with suppress(Exception):
        store.set(_BROKEN, "")


class JointGroup(Group):
    """The ranks of a replica, then the workers. A member is either.

    Args:
        store: the store of all members.
        rank, size: this member among all.
        device: where windows are. A CUDA device takes NCCL, the CPU gloo.
        seconds: how long one member waits for another.
        pipes: the connections to the other side that this member watches.

    Raises:
        TransferError: when a member did not come, or has ended.
    """

    def __init__(
        self, store: Any, rank: int, size: int, device: torch.device, seconds: float, pipes: Sequence[Connection]
    ) -> None:
        self.rank, self.size, self.device, self.members = rank, size, device, [*range(size)]
        self._store = open_store(store.host, seconds, store.port)  # one's own: a group that connects blocks its store
        self._pipes, self._stream, self._grid = pipes, None, None
        self._broken = Event()
        self.group: Any
        timeout = timedelta(seconds=seconds)

        def connected() -> Any:
            if device.type != "cuda":
                return dist.ProcessGroupGloo(store, rank, size, timeout)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            with torch.cuda.device(device):
                group = dist.ProcessGroupNCCL(store, rank, size, options)
                group.eager_connect_single_device(device)
                return group

        self.group = self._met(connected)

    def _met(self, action: Callable[[], T]) -> T:
        """Run an action that waits for all members, in a thread that is left alone if one of them has ended."""
        done: list[T] = []
        failed: list[Exception] = []

        def run() -> None:
            try:
                done.append(action())
            except Exception as error:
                failed.append(error)

        thread = Thread(target=run, daemon=True)
        thread.start()
        while thread.is_alive() and not self._is_broken():
            thread.join(_PAUSE)
        if not done:
            break_store(self._store)
            reason = failed[0] if failed else "found that one of them has ended"
            raise TransferError(f"expected {self.size} ranks and workers to connect, {reason}")
        return done[0]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Run a block with collectives. If a member ends meanwhile, they fail, and do not wait for it.

        Raises:
            TransferError: when the group broke.
        """
        over = Event()

        def watch() -> None:
            while not over.wait(_PAUSE):
                if self._is_broken():
                    self._broken.set()
                    self.close()
                    return

        thread = Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
        except Exception:
            self.close()
            raise
        finally:
            over.set()
            thread.join()

    def _is_broken(self) -> bool:
        if any(map(has_ended, self._pipes)):
            return True
        try:
            return bool(self._store.check([_BROKEN]))
        except RuntimeError:  # the member that made the store has ended
            return True

    def close(self) -> None:
        """Break the group: collectives that wait fail on all members."""
        break_store(self._store)
        if self.device.type == "cuda":
            with suppress(Exception):
                self.group.abort()
        else:  # the end of a gloo group would wait for what still runs
            _left.append(self.group)

    def _waiting(self, work: Any) -> Any:
        """A collective whose ``wait`` ends if the group breaks. On a GPU ``abort`` does this."""
        return work if self.device.type == "cuda" else _Breakable(work, self._broken)

    @naming_lost_ranks("sending windows of weights")
    def exchange_windows(self, received: Tensor, sent: Tensor, widths: Sequence[int], own: Sequence[int]) -> list[Any]:
        """As ``Group.exchange_windows``."""
        work = self.group.alltoall_base(received, sent, [*widths], [*own], _dist.AllToAllOptions())
        return [self._waiting(work)]

    @naming_lost_ranks("agreeing with other ranks")
    def _reduced(self, numbers: Sequence[int], operation: Any) -> list[int]:
        reduced = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        options = _dist.AllreduceOptions()
        options.reduceOp = operation
        self._waiting(self.group.allreduce([reduced], options)).wait()
        return [int(number) for number in reduced.tolist()]

    @naming_lost_ranks("exchanging descriptions with other ranks")
    def all_gather_object(self, value: Any) -> list[Any]:
        """As ``Group.all_gather_object``."""
        own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        padded = torch.zeros(self.max(len(own)), dtype=torch.uint8, device=self.device)
        padded[: len(own)] = own.to(self.device)
        gathered = [torch.empty_like(padded) for _ in self.members]
        self._waiting(self.group.allgather([gathered], [padded])).wait()
        return [pickle.loads(part.cpu().numpy().tobytes()) for part in gathered]


class _Breakable:
    """A collective of gloo."""

    def __init__(self, work: Any, broken: Event) -> None:
        self._work, self._broken = work, broken

    def wait(self) -> None:
        """Wait until it is done.

        Raises:
            TransferError: when the group broke before.
        """
        while not self._work.is_completed():
            if self._broken.wait(_POLL):
                raise TransferError("expected all ranks and workers to go on, found that one of them has ended")
        self._work.wait()
