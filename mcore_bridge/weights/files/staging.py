"""Host memory between files and devices: a few slots, and the threads that fill or empty them.

Work begins in the order in which it comes and ends in that order for the caller, and no more of it is under way than
there are slots. So memory is bounded, a slow disk or device holds the caller up only when all slots are taken, and what
a thread raises is raised in the caller.
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
    """Memory of a fixed size that is used again and again; pinned where a GPU reads or writes it."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._memory: Tensor | None = None
        self._event: torch.cuda.Event | None = None

    def memory(self, num_bytes: int, device: torch.device) -> Tensor:
        """The first ``num_bytes`` of the slot, uint8, for copies from or to ``device``. Taken when first asked for.

        It grows where what cannot be divided asks for more.
        """
        if self._memory is None or self._memory.nbytes < num_bytes:
            size = max(self._num_bytes, num_bytes, 8)
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        return self._memory[:num_bytes]

    def mark(self, device: torch.device) -> None:
        """Note that copies from or to ``device`` were enqueued, and must be over before others use the slot."""
        if device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Wait for the copies that were noted."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None


class Staging:
    """A ring of slots. ``take`` one, then ``submit`` what a thread is to do with it; leaving waits for everything."""

    def __init__(self, slot_bytes: int = SLOT_BYTES) -> None:
        self.slot_bytes = slot_bytes
        self._free = deque(Slot(slot_bytes) for _ in range(NUM_SLOTS))
        self._busy: deque[tuple[Slot, Future[None], Callable[[], None] | None]] = deque()
        self._threads = ThreadPoolExecutor(NUM_THREADS, "staging")

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            while self._busy and kind is None:
                self._finish()
        finally:
            self._threads.shutdown(wait=True, cancel_futures=True)
            for slot in self._free:
                slot.wait()

    def take(self) -> Slot:
        """The next slot, when what was submitted with it has finished.

        Raises:
            Exception: what was raised there.
        """
        if not self._free:
            self._finish()
        return self._free.popleft()

    def submit(self, slot: Slot, work: Callable[[], None], then: Callable[[], None] | None = None) -> None:
        """Let a thread do ``work`` when the copies noted on ``slot`` are over; ``then`` is for the caller's thread."""

        def run() -> None:
            slot.wait()
            work()

        self._busy.append((slot, self._threads.submit(run), then))

    def _finish(self) -> None:
        slot, future, then = self._busy.popleft()
        future.result()
        if then is not None:
            then()
        self._free.append(slot)
