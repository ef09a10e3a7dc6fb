"""Runs copies of bytes between buffers: on a GPU all at once by one kernel, elsewhere one after the other."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.util import find_spec
from operator import attrgetter
from threading import Thread
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mcore_bridge.errors import TransferError
from mcore_bridge.weights.plan.boxes import WIDEST, ByteCopy, Numbers, Rows, Table

if TYPE_CHECKING:
    from mcore_bridge.weights.transfer.triton_copy import Launch

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by their size: a copy as integers keeps every bit."""
MOST_ALLOCATIONS = 64
"""Allocations of a rank that are opened or looked up in each round. To open one takes some 0.2 ms in an engine.

megatron-core's DDP makes a few.
"""
_CPU = -1
"""What torch gives as the index of a CPU."""


@dataclass(frozen=True, eq=False)
class Made:
    """New tensors in the places of others.

    Attributes:
        numbers: their places, int64.
        addresses: their addresses, in this order.
        tensors: makes views of them.
    """

    numbers: Numbers
    addresses: Numbers
    tensors: Callable[[], Sequence[Tensor]]

    @classmethod
    def of(cls, tensors: Mapping[int, Tensor]) -> Made:
        """Tensors by number."""
        addresses = [*map(Tensor.data_ptr, tensors.values())]
        own = [*tensors.values()]
        return cls(np.array([*tensors], dtype=np.int64), np.array(addresses, dtype=np.int64), lambda: own)


class Buffers:
    """Contiguous tensors between which bytes are copied, with their addresses for a kernel.

    Args:
        tensors: the tensors, by number; or a function that makes them, for buffers whose addresses are set.
        gpus: the indices of the GPUs of the tensors, if the caller has them; None looks at every tensor.
    """

    def __init__(
        self, tensors: Sequence[Tensor] | Callable[[], Sequence[Tensor]], gpus: frozenset[int] | None = None
    ) -> None:
        self._given, self._gpus = tensors, gpus
        self._on_device: dict[torch.device, Tensor] = {}
        self._before: Buffers | None = None
        self._replaced: Sequence[Numbers] = ()

    @property
    def plain(self) -> Buffers:
        """The buffers before some were replaced."""
        return self if self._before is None else self._before

    @cached_property
    def made(self) -> frozenset[int]:
        """The numbers of those that ``with_others`` has replaced."""
        return frozenset(number for numbers in self._replaced for number in numbers.tolist())

    @cached_property
    def tensors(self) -> Sequence[Tensor]:
        """The tensors. A kernel needs their addresses only."""
        return self._given() if callable(self._given) else self._given

    @cached_property
    def addresses(self) -> Numbers:
        """The addresses of the tensors."""
        return np.array([*map(Tensor.data_ptr, self.tensors)], dtype=np.int64)

    @classmethod
    def of(cls, allocations: Allocations) -> Buffers:
        """The tensors of ``allocations``, as they lay there."""
        buffers = cls(allocations.tensors, frozenset(map(Tensor.get_device, allocations.wholes)) - {_CPU})
        buffers.addresses, buffers.allocations = allocations.addresses, allocations
        buffers.on_gpu = all(whole.is_cuda or whole.is_pinned() for whole in allocations.wholes)
        return buffers

    @cached_property
    def allocations(self) -> Allocations:
        """The allocations in which the tensors lie."""
        return Allocations(self.tensors, self.addresses)

    def addresses_on(self, device: torch.device) -> Tensor:
        """The addresses as a tensor on a GPU, int64 [buffers]. They are sent to the GPU once."""
        if device not in self._on_device:
            pinned = torch.empty(len(self.addresses), dtype=torch.int64, pin_memory=True)
            pinned.numpy()[:] = self.addresses
            self._on_device[device] = pinned.to(device, non_blocking=True)
        return self._on_device[device]

    def at(self, numbers: Numbers) -> Buffers:
        """The buffers of these numbers, in this order, each any number of times."""
        if np.array_equal(numbers, np.arange(len(self.addresses))):
            return self
        chosen = Buffers(lambda: [self.tensors[number] for number in numbers.tolist()], self.gpus)
        chosen.addresses, chosen.on_gpu = self.addresses[numbers], self.on_gpu
        return chosen

    def beside(self, others: Buffers) -> Buffers:
        """These buffers, and then ``others``."""
        joined = Buffers(lambda: [*self.tensors, *others.tensors], self.gpus | others.gpus)
        joined.addresses = np.concatenate([self.addresses, others.addresses])
        joined.on_gpu = self.on_gpu and others.on_gpu
        return joined

    def with_others(self, others: Sequence[Made]) -> Buffers:
        """These buffers, with ``others`` in the places of their numbers, on the same devices."""
        changed = Buffers(lambda: self._with(others), self.gpus)
        changed.addresses = self.addresses.copy()
        for made in others:
            changed.addresses[made.numbers] = made.addresses
        changed.on_gpu = self.on_gpu
        changed._before = self.plain
        changed._replaced = [*self._replaced, *(made.numbers for made in others)]
        return changed

    def _with(self, others: Sequence[Made]) -> Sequence[Tensor]:
        tensors = [*self.tensors]
        for made in others:
            for number, tensor in zip(made.numbers.tolist(), made.tensors(), strict=True):
                tensors[number] = tensor
        return tensors

    @cached_property
    def is_aligned(self) -> bool:
        """Whether all tensors begin at a multiple of ``WIDEST``."""
        return not (self.addresses % WIDEST).any()

    @cached_property
    def on_gpu(self) -> bool:
        """Whether a kernel can access all tensors: each is on a GPU, or pinned on the host."""
        return _CPU not in self._devices or all(tensor.is_cuda or tensor.is_pinned() for tensor in self.tensors)

    def takes_rows(self, device: torch.device) -> bool:
        """Whether a kernel on ``device`` can write rows of codes into the tensors."""
        return len(self.addresses) > 0 and self.is_aligned and (device.type == "cpu" or self.on_gpu)

    @cached_property
    def gpus(self) -> frozenset[int]:
        """The indices of the GPUs on which the tensors are."""
        return self._devices - {_CPU} if self._gpus is None else self._gpus

    @cached_property
    def _devices(self) -> frozenset[int]:
        """The indices of the devices of all tensors."""
        return frozenset(map(Tensor.get_device, self.tensors))


class Allocations:
    """The allocations in which contiguous tensors lie. It is of no use if they are more than ``MOST_ALLOCATIONS``.

    Args:
        tensors: the tensors.
        addresses: their addresses; 0 for a tensor without bytes.
    """

    def __init__(self, tensors: Sequence[Tensor], addresses: Numbers) -> None:
        self.numbers: Numbers = np.zeros(len(addresses), dtype=np.int64)
        """The number of the allocation of each tensor that has bytes."""
        self.offsets: Numbers = np.zeros(len(addresses), dtype=np.int64)
        """The byte of the allocation at which each tensor begins."""
        self.wholes: list[Tensor] = []
        """The allocations, uint8 [bytes] each. Empty this list to keep the object without the memory."""
        order = np.argsort(addresses, kind="stable")
        in_order = addresses[order]
        at = int(np.searchsorted(in_order, 1))
        firsts: list[Tensor] = []
        self._empty = order[:at]
        while at < len(order) and len(self.wholes) <= MOST_ALLOCATIONS:  # one tensor says where the others lie
            firsts.append(tensors[order[at]])
            whole = whole_of(firsts[-1])
            end = int(np.searchsorted(in_order, whole.data_ptr() + whole.numel()))
            self.numbers[order[at:end]] = len(self.wholes)
            self.offsets[order[at:end]] = in_order[at:end] - whole.data_ptr()
            self.wholes.append(whole)
            at = end
        self._num_bytes = [*map(attrgetter("nbytes"), tensors)]
        self._firsts = [*map(weakref.ref, firsts)]
        self._places = [*map(_place, firsts)]

    def is_like(self, other: Allocations) -> bool:
        """Whether all tensors lie at the same places of allocations, which may be elsewhere."""
        return np.array_equal(self.numbers, other.numbers) and np.array_equal(self.offsets, other.offsets)

    def find(self) -> bool:
        """Look up ``wholes`` again by one tensor of each. False if there are too many.

        It is also False if such a tensor is gone, or lies in another way.

        All other tensors may have moved meanwhile, and only a look at each can tell.
        """
        firsts = [tensor for first in self._firsts if (tensor := first()) is not None]
        if len(self._places) > MOST_ALLOCATIONS or [*map(_place, firsts)] != self._places:
            return False
        self.wholes = [*map(whole_of, firsts)]
        return True

    @property
    def addresses(self) -> Numbers:
        """The addresses of the tensors, if they lie as they did in ``wholes``."""
        wholes = np.array([*map(Tensor.data_ptr, self.wholes), 0], dtype=np.int64)
        addresses = wholes[self.numbers] + self.offsets
        addresses[self._empty] = 0
        return addresses

    def tensors(self) -> list[Tensor]:
        """The bytes of the tensors, if they lie as they did in ``wholes``."""
        places = zip(self.numbers.tolist(), self.offsets.tolist(), self._num_bytes, strict=True)
        return [self.wholes[number][start : start + size] if size else torch.empty(0) for number, start, size in places]


@dataclass(frozen=True, eq=False)
class RowPlaces:
    """The places of all rows of some shards.

    Attributes:
        rows: by the number of a shard's codes.
        memory: the engine's tensors, all at multiples of ``WIDEST``.
        launches: what ``ShardEncoder`` keeps of launches into this memory.
    """

    rows: Mapping[int, Rows]
    memory: Buffers
    launches: dict[Any, Any] = field(default_factory=dict)

    def distances(self, numbers: Sequence[int], device: torch.device) -> Tensor:
        """Where the parts of the rows of these codes begin, on ``device``, int64 [parts of all rows].

        It is counted in ``WIDEST`` bytes from the beginning of the result; 0 for a part without a place.
        """
        own = [self.rows[number] for number in numbers]
        tensors, starts = (np.concatenate([places.ravel() for places in column]) for column in zip(*own, strict=True))
        result = torch.empty(len(tensors), dtype=torch.int64, device=device)
        distances = (self.memory.addresses[tensors] + starts - result.data_ptr()) // WIDEST
        return result.copy_(torch.from_numpy(np.where(tensors < 0, 0, distances)))


def whole_of(tensor: Tensor) -> Tensor:
    """The allocation of a tensor, uint8 [bytes]."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _place(tensor: Tensor) -> tuple[object, ...]:
    """How a tensor lies in its allocation, without the address."""
    storage = tensor.untyped_storage()
    start = tensor.data_ptr() - storage.data_ptr()
    return tensor.device, storage.nbytes(), start, tensor.nbytes, tensor.is_contiguous()


class CopyTable:
    """Copies that write to different bytes, or rows of such tables, as a table for a kernel."""

    def __init__(self, copies: Iterable[ByteCopy] | Iterable[Numbers]) -> None:
        self.table: Table = np.array([*copies], dtype=np.int64).reshape(-1, len(ByteCopy._fields))
        self._launches: dict[tuple[torch.device, bool], tuple[Launch, ...]] = {}

    def run(self, staying: Buffers, passing: Buffers, device: torch.device) -> None:
        """Run all copies on the current stream of ``device``, in any order, without waiting for them.

        No copy may read what another one writes. Streams are ordered as for torch's copies between two GPUs: the kernel
        waits for the current streams of other GPUs with buffers, and these wait for the kernel.

        Args:
            staying: the first buffers by number, which many tables share. They may be on any device, at any address.
            passing: the following buffers, on a GPU or pinned, at multiples of ``WIDEST``.
            device: where the kernel runs. It accesses buffers on other GPUs of the machine over their links.

        Raises:
            TransferError: when kernels of ``device`` cannot access the GPU of a buffer on this machine.
        """
        if device.type == "cuda" and has_triton() and staying.on_gpu:
            self._launch(staying, passing, device)
            return
        tensors = [*staying.tensors, *passing.tensors]
        for row in self.table.tolist():
            copy = ByteCopy(*row)
            source = _words(tensors[copy.source], copy, (copy.source_start, copy.source_row, copy.source_col))
            target = _words(tensors[copy.target], copy, (copy.target_start, copy.target_row, copy.target_col))
            target.copy_(source)

    def _launch(self, staying: Buffers, passing: Buffers, device: torch.device) -> None:
        from mcore_bridge.weights.transfer.triton_copy import launch, prepare

        device = indexed(device)
        with torch.cuda.device(device), beside_peers(device, staying.gpus | passing.gpus):
            kind = device, staying.is_aligned
            if kind not in self._launches:
                self._launches[kind] = prepare(self.table, aligned=staying.is_aligned, device=device)
            launch(self._launches[kind], staying.addresses_on(device), passing.addresses_on(device))


def indexed(device: torch.device) -> torch.device:
    """``device`` with an index: its own, or else the index of the current device."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


@contextmanager
def beside_peers(device: torch.device, gpus: frozenset[int]) -> Iterator[None]:
    """Let kernels of the block access the memory of ``gpus``, ordered with their current streams."""
    peers = [torch.device("cuda", index) for index in gpus if index != device.index]
    for peer in peers:
        _enable_peer_access(device, peer)
        torch.cuda.current_stream(device).wait_stream(torch.cuda.current_stream(peer))
    yield
    for peer in peers:
        torch.cuda.current_stream(peer).wait_stream(torch.cuda.current_stream(device))


@cache
def _enable_peer_access(device: torch.device, peer: torch.device) -> None:
    """Let kernels of one GPU access the memory of another GPU.

    Raises:
        TransferError: when the machine does not allow this.
    """
    if not torch.cuda.can_device_access_peer(device, peer):
        raise TransferError(
            f"expected two GPUs with peer access, found {device}, which cannot access the memory of {peer} on this "
            'machine: send buckets through a ring with device="cpu"'
        )
    torch.zeros(1, device=peer).copy_(torch.zeros(1, device=device))  # torch's first copy enables the access for good


def _words(buffer: Tensor, copy: ByteCopy, strides: tuple[int, int, int]) -> Tensor:
    """The elements of a copy in one buffer, as integers: torch copies these bit for bit.

    Args:
        strides: bytes of the start, of a row and of a column.
    """
    start, row, col = (num_bytes // copy.item for num_bytes in strides)
    flat = buffer.detach().view(-1).view(WORDS[copy.item])
    return flat.as_strided((copy.rows, copy.cols), (row, col), flat.storage_offset() + start)


@contextmanager
def compiling(device: torch.device) -> Iterator[None]:
    """Compile the kernel while the block runs, if copies on ``device`` need it. This takes up to a second, once."""
    if device.type != "cuda" or not has_triton():
        yield
        return
    import mcore_bridge.weights.transfer.triton_copy  # noqa: F401  # and so Triton, before the block may import it, too

    thread = Thread(target=_compile, args=(indexed(device),))  # a thread has its own current device
    thread.start()
    try:
        yield
    finally:
        thread.join()


@cache
def _compile(device: torch.device) -> None:
    """Compile the kernel for the two shapes of tiles that the copies of most exports have."""
    with suppress(Exception), torch.cuda.device(device):  # an export that needs the kernel raises then
        for rows in (1, 128):
            copy = ByteCopy(0, 0, 1, 0, rows, WIDEST, 1, WIDEST, 1, WIDEST, 1)
            source, target = (torch.empty(copy.num_bytes(), dtype=torch.uint8, device=device) for _ in range(2))
            CopyTable([copy]).run(Buffers([source]), Buffers([target]), device)


@cache
def has_triton() -> bool:
    """Whether a kernel runs copies on a GPU."""
    return find_spec("triton") is not None
