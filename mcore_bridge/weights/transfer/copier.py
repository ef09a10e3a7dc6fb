"""Runs copies of bytes between buffers: on a GPU all at once by one kernel, elsewhere one after the other."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from importlib.util import find_spec
from operator import attrgetter
from threading import Thread
from typing import TYPE_CHECKING, Any, Protocol

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
        self._chosen: tuple[Buffers, Numbers] | None = None
        """Of which buffers these are some, and their numbers there."""
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
        buffers = cls.laid(allocations.layout, allocations.wholes)
        buffers.allocations = allocations
        return buffers

    @classmethod
    def laid(cls, layout: AllocationLayout, wholes: Sequence[Tensor]) -> Buffers:
        """Tensors by their layout in allocations ``wholes``, uint8 [bytes] each."""
        buffers = cls(partial(layout.tensors, wholes), frozenset(map(Tensor.get_device, wholes)) - {_CPU})
        buffers.addresses = layout.addresses(wholes)
        buffers.on_gpu = all(whole.is_cuda or whole.is_pinned() for whole in wholes)
        return buffers

    @cached_property
    def allocations(self) -> Allocations:
        """The allocations in which the tensors lie."""
        if self._chosen is None:
            return Allocations(self.tensors, self.addresses)
        buffers, numbers = self._chosen
        return buffers.allocations.at(numbers)

    def addresses_on(self, device: torch.device) -> Tensor:
        """The addresses as a tensor on a GPU, int64 [buffers]. They are sent to the GPU once."""
        if device not in self._on_device:
            pinned = torch.empty(len(self.addresses), dtype=torch.int64, pin_memory=device.type == "cuda")
            pinned.numpy()[:] = self.addresses
            self._on_device[device] = pinned.to(device, non_blocking=True)
        return self._on_device[device]

    def at(self, numbers: Numbers) -> Buffers:
        """The buffers of these numbers, in this order, each any number of times."""
        if np.array_equal(numbers, np.arange(len(self.addresses))):
            return self
        chosen = Buffers(lambda: [self.tensors[number] for number in numbers.tolist()], self.gpus)
        chosen.addresses, chosen.on_gpu, chosen._chosen = self.addresses[numbers], self.on_gpu, (self, numbers)
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


@dataclass(frozen=True, eq=False)  # numpy's arrays have no single truth
class AllocationLayout:
    """Where contiguous tensors lie in some allocations, wherever these are.

    Attributes:
        numbers: the allocation of each tensor, int64; -1 for a tensor without an address.
        offsets: the byte of the allocation at which it begins, int64.
        sizes: its bytes, int64.
    """

    numbers: Numbers
    offsets: Numbers
    sizes: Numbers

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AllocationLayout):
            return NotImplemented
        own, others = (self.numbers, self.offsets, self.sizes), (other.numbers, other.offsets, other.sizes)
        return all(map(np.array_equal, own, others))

    def addresses(self, wholes: Sequence[Tensor]) -> Numbers:
        """The addresses of the tensors in these allocations; 0 for a tensor without one."""
        return np.array([*map(Tensor.data_ptr, wholes), 0], dtype=np.int64)[self.numbers] + self.offsets

    def tensors(self, wholes: Sequence[Tensor]) -> list[Tensor]:
        """The bytes of the tensors."""
        places = zip(self.numbers.tolist(), self.offsets.tolist(), self.sizes.tolist(), strict=True)
        return [wholes[number][start : start + size] if size else torch.empty(0) for number, start, size in places]


class Allocations:
    """The allocations in which contiguous tensors lie. It is of no use if they are more than ``MOST_ALLOCATIONS``.

    Args:
        tensors: the tensors.
        addresses: their addresses; 0 for a tensor without bytes.
    """

    def __init__(self, tensors: Sequence[Tensor], addresses: Numbers) -> None:
        self.wholes: list[Tensor] = []
        """The allocations, uint8 [bytes] each. Empty this list to keep the object without the memory."""
        numbers, offsets = np.full(len(addresses), -1, dtype=np.int64), np.zeros(len(addresses), dtype=np.int64)
        order = np.argsort(addresses, kind="stable")
        in_order = addresses[order]
        at = int(np.searchsorted(in_order, 1))
        firsts: list[Tensor] = []
        while at < len(order) and len(self.wholes) <= MOST_ALLOCATIONS:  # one tensor says where the others lie
            firsts.append(tensors[order[at]])
            whole = whole_of(firsts[-1])
            end = int(np.searchsorted(in_order, whole.data_ptr() + whole.numel()))
            numbers[order[at:end]] = len(self.wholes)
            offsets[order[at:end]] = in_order[at:end] - whole.data_ptr()
            self.wholes.append(whole)
            at = end
        self.layout = AllocationLayout(
            numbers, offsets, np.array([*map(attrgetter("nbytes"), tensors)], dtype=np.int64)
        )
        self._firsts = [*map(weakref.ref, firsts)]
        self._places = [*map(_place, firsts)]

    def at(self, numbers: Numbers) -> Allocations:
        """The same allocations, for the tensors of these numbers."""
        chosen, layout = copy(self), self.layout
        chosen.layout = AllocationLayout(layout.numbers[numbers], layout.offsets[numbers], layout.sizes[numbers])
        return chosen

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


class PlacedMaker(Protocol):
    """Makes codes and scales in the process of an engine, which has their places. It can be sent there."""

    @property
    def numbers(self) -> frozenset[int]:
        """The numbers of the tensors that it makes."""

    def make(self, held: Buffers, memory: Buffers, device: torch.device) -> Sequence[Made]:
        """Write all codes to their places in ``memory``, from the tensors of an export; the scales are returned.

        This does not wait for the GPU.
        """

    def wrong(self) -> tuple[int, int] | None:
        """What could not be made, if anything, in numbers for an error; after a wait for the GPU."""


def distances(rows: Rows, memory: Buffers, device: torch.device) -> Tensor:
    """Where parts of rows begin in ``memory``, on ``device``, int64 [parts].

    It is counted in ``WIDEST`` bytes from the beginning of the result; 0 for a part without a place.
    """
    result = torch.empty(len(rows.tensors), dtype=torch.int64, device=device)
    places = (memory.addresses[rows.tensors] + rows.starts - result.data_ptr()) // WIDEST
    return result.copy_(torch.from_numpy(np.where(rows.tensors < 0, 0, places)))


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
        if runs_kernel(device) and staying.on_gpu:
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
    if not runs_kernel(device):
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


def runs_kernel(device: torch.device) -> bool:
    """Whether kernels run on ``device``."""
    return device.type == "cuda" and has_triton()


@cache
def has_triton() -> bool:
    """Whether a kernel runs copies on a GPU."""
    return find_spec("triton") is not None
