"""An engine's loader that is called once for a round, while its tensors come bucket by bucket.

A loader pulls its next tensor, while a sender pushes the next bucket. So the loader runs in a separate thread. Only one
of the two threads runs at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from queue import SimpleQueue
from threading import Semaphore, Thread

import torch

from mcore_bridge.errors import TransferError
from mcore_bridge.rules.spec import Pair

Loader = Callable[[Iterator[Pair]], object]
"""The engine's loader, with all work after loading. It takes pairs of an HF name and a tensor."""


class LoaderThread:
    """One call of a loader.

    Args:
        load: the loader.
        device: the device of the engine's tensors. The loader queues work there on this thread's current stream.
    """

    def __init__(self, load: Loader, device: torch.device) -> None:
        self._load, self._device = load, device
        self._sent: SimpleQueue[list[Pair] | None] = SimpleQueue()
        self._asks = Semaphore(0)
        self._failure: Exception | None = None
        self._is_broken_off = self._has_ended = False
        self._modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()
        self._asks.acquire()

    def send(self, pairs: Iterable[Pair]) -> None:
        """Pass tensors to the loader. It gets copies on the engine's device, which it may keep.

        Raises:
            Exception: what the loader raises.
        """
        if not self._has_ended:
            self._sent.put([(name, tensor.to(self._device, copy=True)) for name, tensor in pairs])
            self._asks.acquire()
        self._raise()

    def finish(self) -> None:
        """Signal the end of the tensors, and wait until the loader returns.

        Raises:
            Exception: what the loader raises.
        """
        self._sent.put(None)
        self._thread.join()
        self._raise()

    def break_off(self) -> None:
        """End the call after a round that broke off, by an error inside the loader."""
        self._is_broken_off = True
        self._sent.put(None)
        self._thread.join()

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        grad, inference = self._modes
        try:
            with ExitStack() as stack:
                stack.enter_context(torch.inference_mode(inference))
                stack.enter_context(torch.set_grad_enabled(grad and not inference))
                if self._stream is not None:
                    stack.enter_context(torch.cuda.device(self._device))
                    stack.enter_context(torch.cuda.stream(self._stream))
                self._load(self._pairs())
        except Exception as failure:
            self._failure = failure
        finally:
            self._has_ended = True
            self._asks.release()

    def _pairs(self) -> Iterator[Pair]:
        while True:
            self._asks.release()
            pairs = self._sent.get()
            if self._is_broken_off:
                raise TransferError("the round broke off before all tensors had come")
            if pairs is None:
                return
            yield from pairs
