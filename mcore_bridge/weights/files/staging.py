"""Moves data between files and devices through a few slots of host memory, by threads that fill or empty the slots.

Work begins in the order in which it is submitted, and the caller gets results in this order. Each piece of work needs a
slot, so memory is bounded. A slow disk or device blocks the caller only while all slots are in use. An error in a
thread is raised in the caller.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch
from torch import Tensor

SLOT_BYTES = 16 << 20
NUM_SLOTS = 12
NUM_THREADS = 8


class Slot:
    """Memory of a fixed size that is reused; pinned if a GPU reads or writes it."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._memory: Tensor | None = None
        self._event: torch.cuda.Event | None = None

    def memory(self, num_bytes: int, device: torch.device) -> Tensor:
        """The first ``num_bytes`` of the slot, uint8, for copies from or to ``device``. The first call allocates it.

        The slot grows if a single piece needs more.
        """
        if self._memory is None or self._memory.nbytes < num_bytes:
            size = max(self._num_bytes, num_bytes, 8)
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        return self._memory[:num_bytes]

    def mark(self, device: torch.device) -> None:
        """Record that copies from or to ``device`` were enqueued. The slot is reused only after they end."""
        if device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Wait for the copies that ``mark`` recorded."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None


class Staging:
    """A ring of slots. ``take`` one, then ``submit`` the work of a thread with it; the exit waits for all work."""

    def __init__(self, slot_bytes: int = SLOT_BYTES) -> None:
        self.slot_bytes = slot_bytes
        self._free = deque(Slot(slot_bytes) for _ in range(NUM_SLOTS))
        self._busy: deque[tuple[Slot, Future[None], Callable[[], None] | None]] = deque()
        self._threads = ThreadPoolExecutor(NUM_THREADS, "staging")

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self._threads.shutdown(wait=True, cancel_futures=True)
            for slot in self._free:
                slot.wait()

    def take(self) -> Slot:
        """The next slot, after the work that was submitted with it has finished.

        Raises: Exception: the error of that work.
        """
        if not self._free:
            self._finish()
        return self._free.popleft()

    def submit(self, slot: Slot, work: Callable[[], None], then: Callable[[], None] | None = None) -> None:
        """Let a thread do ``work`` after the copies that ``slot`` waits for; the caller's thread does ``then``."""

        def run() -> None:
            slot.wait()
            work()

        self._busy.append((slot, self._threads.submit(run), then))

    def finish(self) -> None:
        """Wait for all work that was submitted."""
        while self._busy:
            self._finish()

    def _finish(self) -> None:
        slot, future, then = self._busy.popleft()
        future.result()
        if then is not None:
            then()
        self._free.append(slot)


class InThisThread(Staging):
    """Staging without further threads, which a process that ends could no longer start."""

    def submit(self, slot: Slot, work: Callable[[], None], then: Callable[[], None] | None = None) -> None:
        """Do the work now."""
        slot.wait()
        work()
        if then is not None:
            then()
        self._free.append(slot)
