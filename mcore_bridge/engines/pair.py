"""A process group of two: a trainer rank, and a worker of an engine that cannot open the trainer's memory.

It stands beside torch's default group, so neither process has to be in a group of the other.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_bridge.errors import TransferError

TRAINER, WORKER = 0, 1
_dist: Any = dist  # its stores are missing from torch's types


def open_store(host: str, seconds: float, port: int = 0) -> Any:
    """The store at which the two find each other. The trainer rank makes it, and the worker gets its ``port``."""
    return _dist.TCPStore(host, port, None, not port, timedelta(seconds=seconds), wait_for_workers=False)


class ProcessPair:
    """One end of a connection by NCCL or gloo, which carries flat memory from the trainer rank to the worker.

    Args:
        store: the store of both.
        rank: ``TRAINER`` or ``WORKER``.
        device: where the memory is. A CUDA device takes NCCL, the CPU gloo.
        seconds: how long one side waits for the other.
    """

    def __init__(self, store: Any, rank: int, device: torch.device, seconds: float) -> None:
        self._group: Any
        timeout = timedelta(seconds=seconds)
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            with torch.cuda.device(device):
                self._group = dist.ProcessGroupNCCL(store, rank, 2, options)
                self._group.eager_connect_single_device(device)
        else:
            self._group = dist.ProcessGroupGloo(store, rank, 2, timeout)
        self._store = store  # which must live as long as the group

    def send(self, memory: Tensor) -> None:
        """Send flat memory to the worker; on a GPU this returns when the copy is queued on the current stream."""
        self._run(lambda: self._group.send([memory], WORKER, 0).wait())

    def receive(self, memory: Tensor) -> None:
        """Fill flat memory with what the trainer rank sends; on a GPU in the order of the current stream."""
        self._run(lambda: self._group.recv([memory], TRAINER, 0).wait())

    def _run(self, action: Callable[[], object]) -> None:
        try:
            action()
        except RuntimeError as error:
            raise TransferError(f"the connection to the other process broke ({str(error).splitlines()[0]})") from None

    def close(self) -> None:
        """End the connection, also if the other side has died and never takes what was sent."""
        with suppress(Exception):
            getattr(self._group, "abort", getattr(self._group, "shutdown", lambda: None))()
