"""Saves that end in a thread, while training goes on: copies in host memory, and a handle for the caller.

The thread communicates over a gloo group of its own. Training never waits for it, nor it for training. Each rank has
one such thread: the next save waits for it first. So at most the copies of one save are held.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor

from mcore_bridge.errors import CheckpointError
from mcore_bridge.weights.transfer.collectives import Group
from mcore_bridge.weights.transfer.failures import raise_on_all

T = TypeVar("T")
logger = logging.getLogger("mcore_bridge")
_pending: list[PendingSave[object]] = []


class HostCopies:
    """Copies of tensors in host memory, pinned if they come from a GPU. One thread makes them, another takes them.

    Args:
        most_bytes: how many bytes may be held at once. A tensor that is larger is held alone. None: no limit.
    """

    def __init__(self, most_bytes: int | None = None) -> None:
        self._most = most_bytes
        self._held = 0
        self._streams: set[torch.cuda.Stream] = set()
        self._waiting: deque[tuple[str, Tensor, torch.cuda.Event | None]] = deque()
        self._ended = self._stopped = False
        self._changed = threading.Condition()

    def put(self, name: str, tensor: Tensor, *, own: bool = False) -> None:
        """Copy a tensor, when there is room for it.

        Args:
            own: whether nobody else will change the tensor, so that one in host memory needs no copy.

        Raises:
            CheckpointError: the other thread has stopped.
        """
        num_bytes = tensor.nbytes
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._fits(num_bytes))
            if self._stopped:
                raise CheckpointError("the thread that writes has stopped")
            self._held += num_bytes
        event = None
        if tensor.is_cuda:
            copied = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            copied.copy_(tensor, non_blocking=True)
            event = torch.cuda.Event()
            stream = torch.cuda.current_stream(tensor.device)
            event.record(stream)
            self._streams.add(stream)
        else:
            copied = tensor.detach() if own else tensor.detach().clone()
        with self._changed:
            self._waiting.append((name, copied, event))
            self._changed.notify_all()

    def _fits(self, num_bytes: int) -> bool:
        return self._most is None or not self._held or self._held + num_bytes <= self._most

    def end(self) -> None:
        """Say that no tensor follows. Copies of tensors on a GPU are complete when this returns."""
        for stream in self._streams:
            stream.synchronize()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def stop(self) -> None:
        """Let both threads raise instead of waiting."""
        with self._changed:
            self._stopped = True
            self._waiting.clear()
            self._changed.notify_all()

    def taken(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all copies in order, as they come. A copy counts as held until the next step.

        Raises:
            CheckpointError: the thread that copies has stopped.
        """
        while (copied := self._next()) is not None:
            name, tensor, event = copied
            if event is not None:
                event.synchronize()
            yield name, tensor
            num_bytes = tensor.nbytes
            del copied, tensor
            with self._changed:
                self._held -= num_bytes
                self._changed.notify_all()

    def _next(self) -> tuple[str, Tensor, torch.cuda.Event | None] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._ended or self._waiting)
            if self._stopped:
                raise CheckpointError("the tensors to write did not all come")
            return self._waiting.popleft() if self._waiting else None


class PendingSave(Generic[T]):
    """A save that is being written in a thread. Training may change the models meanwhile.

    The folder changes when the save is complete, whether or not somebody waits. The next save waits for this one first,
    and raises its error if nobody else has asked for it. Wait before process groups are destroyed.

    Attributes:
        folder: the folder that is written.

    Example:
        >>> pending = mb.save_checkpoint(models, "run/iter_0000100", wait=False)
        >>> pending.wait()                          # after some steps: the folder is complete, or this raises
    """

    def __init__(
        self, folder: Path, result: T, copies: HostCopies, work: Callable[[Group], None], opened: ExitStack
    ) -> None:
        """Start the thread.

        Args:
            folder: the folder that is written.
            result: what ``wait`` returns.
            copies: what ``copy_all`` fills.
            work: what the thread does, with the group over which it communicates.
            opened: what the thread closes at its end.
        """
        self.folder = folder
        self._result, self._copies, self._work = result, copies, work
        self._error: BaseException | None = None
        self._group: Group | None = Group.of_trainer()
        self._opened = opened.pop_all()
        self._thread = threading.Thread(target=self._run, name=f"save to {folder}")
        _pending.append(self)  # type: ignore[arg-type]  # whatever its result is
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether the save has ended on this rank, well or not."""
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> T:
        """Wait for the end of the save on this rank. The other ranks need not wait.

        Args:
            timeout: seconds; None waits as long as it takes.

        Returns:
            What the function returns with ``wait=True``.

        Raises:
            CheckpointError: on every rank that waits, when any rank could not write. The folder is then unchanged.
            TimeoutError: the save goes on.
        """
        self._thread.join(timeout)
        if not self.is_done:
            raise TimeoutError(f"the save to {self.folder} still goes on after {timeout} s: wait again")
        self._close()
        if self._error is not None:
            raise self._error
        return self._result

    def _run(self) -> None:
        assert self._group is not None
        try:
            with self._opened:
                self._work(self._group)
        except BaseException as error:  # the caller gets it
            self._error = error
            self._copies.stop()
            logger.error("the save to %s failed: %s", self.folder, error)

    def _close(self) -> None:
        if self._group is not None:
            _pending.remove(self)  # type: ignore[arg-type]
            self._group.close()
            self._group = None


def settle() -> None:
    """Wait for the save that this process may have in the background.

    Raises:
        CheckpointError: it failed, and nobody has asked for its error.
    """
    for save in [*_pending]:
        try:
            save.wait()
        except BaseException as error:
            raise CheckpointError(
                f"the save before this one failed in the background, and this one did not begin; call it again. {error}"
            ) from error


def copy_all(
    pending: PendingSave[T], world: Group, tensors: Generator[tuple[str, Tensor]], *, own: bool = False
) -> PendingSave[T]:
    """Copy everything that a save writes. If a rank fails, all raise, and the save ends.

    Args:
        world: all ranks, which call this together.
        tensors: in the order in which the thread takes them. It is closed before ranks compare how they fared, as other
            ranks may wait for what it sends.
        own: as for ``HostCopies.put``.
    """
    copies = pending._copies
    try:
        with raise_on_all(world, f"{pending.folder} was not changed"), closing(tensors):
            for name, tensor in tensors:
                copies.put(name, tensor, own=own)
            copies.end()
    except BaseException:
        copies.stop()
        pending._thread.join()
        pending._close()
        raise
    return pending
