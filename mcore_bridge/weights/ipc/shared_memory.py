"""Flat memory that another process of the same machine opens: CUDA IPC for a GPU, a mapped file for a CPU.

This module needs only torch: an engine's process imports it.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from mcore_bridge.errors import TransferError

_MEMORY_FILES = Path("/dev/shm")
_DEVICE = 6  # the index of the device among the arguments with which torch rebuilds a CUDA tensor


@dataclass(frozen=True, slots=True)
class Handle:
    """A handle with which another process opens a buffer; it can be pickled. ``rebuild(*args)`` is the buffer.

    On a GPU the pair comes from ``torch.multiprocessing.reductions.reduce_tensor``.
    """

    rebuild: Callable[..., Tensor]
    """The function that opens the memory in another process."""
    args: tuple[Any, ...]
    """The arguments of ``rebuild``."""
    gpu: str | None
    """The UUID of the GPU that has the memory."""
    digest: str = ""
    """The digest of the plan or the engine map of the memory; empty for other memory."""

    def __reduce__(self) -> tuple[Any, ...]:
        """SGLang replaces torch's functions in its processes. So memory of a GPU travels without ``rebuild``."""
        if self.gpu is None:
            return Handle, (self.rebuild, self.args, None, self.digest)
        return _of_gpu, (self.args, self.gpu, self.digest)


def _of_gpu(args: tuple[Any, ...], gpu: str, digest: str) -> Handle:
    """A handle in a process that has received it, with the function that opens memory of a GPU in this process."""
    return Handle(reductions.rebuild_cuda_tensor, args, gpu, digest)


def allocate(num_bytes: int, device: torch.device) -> Tensor:
    """Memory that can be shared, uint8 [num_bytes], on a CUDA device or the CPU. Its values are undefined."""
    if device.type == "cpu":
        return _allocate_file(num_bytes)
    if device.type != "cuda":
        raise TransferError(
            f"expected a CUDA device or the CPU, found {device}, whose memory another process cannot open"
        )
    with _without_expandable_segments():
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def share(buffer: Tensor, digest: str = "") -> Handle:
    """A handle of what ``allocate`` returned, with this digest, for one process, which opens it once.

    On a GPU torch counts handles. If a handle is never opened, or opened twice, the memory is freed only when this
    process ends.
    """
    if buffer.is_cuda:
        rebuild, args = reductions.reduce_tensor(buffer)
        return Handle(rebuild, args, gpu_of(buffer.device), digest)
    return Handle(_map_file, (buffer.untyped_storage().filename, buffer.numel()), None, digest)


def share_part(memory: Tensor, digest: str = "") -> Handle:
    """A handle of memory that torch or an engine has allocated, for one process, which opens it once.

    Args:
        memory: uint8 [bytes], contiguous; it may begin anywhere in its storage. On a CPU that must be of ``allocate``.
        digest: the digest that the handle gets.

    Raises:
        TransferError: when another process cannot open memory of this allocator, such as the allocator of vLLM's sleep
            mode.
    """
    if not memory.is_cuda:
        path = memory.untyped_storage().filename if memory.device.type == "cpu" else None
        if path is None:
            raise TransferError(
                f"expected memory of a CUDA device or a mapped file, found memory of {memory.device} that no other "
                "process can open; send buckets through a ring"
            )
        size = memory.untyped_storage().nbytes()
        return Handle(_map_part, (path, size, memory.storage_offset(), memory.numel()), None, digest)
    try:
        rebuild, args = reductions.reduce_tensor(memory)
    except RuntimeError as error:  # cudaIpcGetMemHandle
        raise TransferError(
            f"CUDA IPC cannot open the memory ({str(error).splitlines()[0]}). Its allocator maps memory itself, like "
            "sleep modes and expandable_segments: send buckets through a ring, or turn these off"
        ) from None
    return Handle(rebuild, args, gpu_of(memory.device), digest)


def open_all(handles: Sequence[Handle], digest: str, otherwise: str) -> list[Tensor]:
    """Open handles, each of which must have this digest; if one has not, raise ``TransferError`` with ``otherwise``.

    If some cannot be opened, all others are opened and let go again: torch counts handles that nobody opens.
    """
    if {*(handle.digest for handle in handles)} != {digest}:
        raise TransferError(otherwise)
    opened: list[Tensor] = []
    problems: list[TransferError] = []
    for handle in handles:
        try:
            opened.append(open_shared(handle))
        except TransferError as error:
            problems.append(error)
    if problems:
        raise problems[0]
    return opened


def open_shared(handle: Handle) -> Tensor:
    """Open a handle in this process. The buffer is the same memory as the sender's.

    Memory of a GPU is opened for the current device, which may be another GPU of the machine. Then kernels of the
    current device access the memory over the link between the two GPUs, and the tensor has the current device. The
    other GPU need not be visible in this process. CUDA does not allow a third device to access memory of another
    process.

    Raises:
        TransferError: when the current device cannot access the memory, or the buffer is gone.
    """
    if handle.gpu is None:
        return handle.rebuild(*handle.args)
    current = torch.device("cuda", torch.cuda.current_device())
    try:
        return handle.rebuild(*handle.args[:_DEVICE], current.index, *handle.args[_DEVICE + 1 :])
    except RuntimeError as error:  # cudaIpcOpenMemHandle
        raise TransferError(
            f"expected memory that {current} (GPU {gpu_of(current)}) reaches, found memory of GPU {handle.gpu} "
            f"that it cannot open ({str(error).splitlines()[0]}). The sender may have ended, or the two GPUs have no "
            'peer access: send buckets through a ring with device="cpu"'
        ) from None


def gpu_of(device: torch.device) -> str:
    """The UUID of a GPU, which is equal in all processes; empty for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


@contextmanager
def _without_expandable_segments() -> Iterator[None]:
    """Make torch allocate with cudaMalloc in the block, and not in expandable segments.

    An expandable segment is shared as a file descriptor, which a container may forbid another process to open. torch
    resets settings that a call omits, so the other settings are passed again.
    """
    settings = torch.cuda.memory._snapshot()["allocator_settings"]
    if not settings["expandable_segments"]:
        yield
        return
    options = settings["PYTORCH_CUDA_ALLOC_CONF"].split(",")
    others = [option for option in options if option and not option.strip().startswith("expandable_segments")]
    _set_allocator(",".join([*others, "expandable_segments:False"]))
    try:
        yield
    finally:
        _set_allocator(",".join([*others, "expandable_segments:True"]))


def _set_allocator(settings: str) -> None:
    newer = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # if it exists, the older name warns
    (newer or torch.cuda.memory._set_allocator_settings)(settings)


def _allocate_file(num_bytes: int) -> Tensor:
    """Memory of a file without a name, which other processes open by this process and its descriptor.

    So no file is left, however this process ends.
    """
    file = tempfile.TemporaryFile(dir=_MEMORY_FILES if _MEMORY_FILES.is_dir() else None)  # noqa: SIM115
    try:
        os.posix_fallocate(file.fileno(), 0, num_bytes)  # with too few pages, a later write would kill this process
        buffer = _map_file(f"/proc/{os.getpid()}/fd/{file.fileno()}", num_bytes)
    except OSError as error:
        file.close()
        raise TransferError(
            f"no {num_bytes} bytes for a buffer in {_MEMORY_FILES}: {error}; free some, or use smaller slots"
        ) from None
    weakref.finalize(buffer, file.close)
    return buffer


def _map_file(path: str, num_bytes: int) -> Tensor:
    size = os.path.getsize(path) if os.path.exists(path) else None
    if size != num_bytes:  # torch would create or enlarge the file
        raise TransferError(
            f"expected a buffer of {num_bytes} bytes at {path}, found {size}; the sender may have ended, or run in a "
            "container whose processes are not visible here"
        )
    return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)


def _map_part(path: str, num_bytes: int, start: int, size: int) -> Tensor:
    return _map_file(path, num_bytes)[start : start + size]
