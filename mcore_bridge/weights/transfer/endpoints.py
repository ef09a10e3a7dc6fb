"""The tensors at both ends of an exchange: those that a rank holds, and HF tensors in the making."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from mcore_bridge.errors import ExportError
from mcore_bridge.weights.plan.alignment import ALIGNMENT
from mcore_bridge.weights.plan.budget import SLAB
from mcore_bridge.weights.plan.export_plan import ExportPlan, Message
from mcore_bridge.weights.plan.payload import OutputTensor
from mcore_bridge.weights.transfer.copier import Buffers
from mcore_bridge.weights.transfer.program import Program, Step


def check_storage(tensors: Mapping[str, Tensor]) -> None:
    """Raise ``ExportError`` where a tensor has no values to be exported."""
    for name, tensor in tensors.items():
        _storage_of(name, tensor)


def _storage_of(name: str, tensor: Tensor) -> torch.UntypedStorage:
    storage = tensor.untyped_storage()
    if storage.nbytes() < tensor.nbytes or tensor.is_meta:
        raise ExportError(f"{name} has no storage: it is on the meta device or its memory was freed; bring it back")
    return storage


class Sources:
    """This rank's tensors, in the memory that they have when an export begins.

    Raises:
        ExportError: when any has none.
    """

    def __init__(self, program: Program, tensors: Mapping[str, Tensor]) -> None:
        self._names = program.names
        found = [tensors[name] for name in self._names]
        self._storages = [*map(_storage_of, self._names, found)]  # they stay if tensors get others
        self._places = [storage.data_ptr() for storage in self._storages]
        self._buffers = Buffers([tensor if tensor.is_contiguous() else tensor.contiguous() for tensor in found])
        self._buffers.addresses  # noqa: B018  # of now

    def read_by(self, step: Step) -> Buffers:
        """All of them; what a step reads must still be there."""
        if [self._storages[number].data_ptr() for number in step.held] != [*map(self._places.__getitem__, step.held)]:
            moved = next(number for number in step.held if self._storages[number].data_ptr() != self._places[number])
            raise ExportError(f"{self._names[moved]} has no storage any more: it was freed or moved amid an export")
        return self._buffers


class Outputs:
    """HF tensors in the making."""

    def __init__(self, plan: ExportPlan, device: torch.device) -> None:
        self._outputs = plan.payload.outputs
        self._like = {dtype: torch.empty(0, dtype=dtype, device=device) for dtype in plan.dtypes}
        self._open: dict[int, Tensor] = {}

    def opened_by(self, step: Step) -> Iterator[Tensor]:
        """The tensors that a step writes to, new ones where it is the first that does."""
        for output, numbers in step.alike:
            is_new = self._open.keys().isdisjoint(numbers)
            new = numbers if is_new else [number for number in numbers if number not in self._open]
            self._open.update(zip(new, self._allocated(output, len(new)), strict=True))
        return map(self._open.__getitem__, step.outputs)

    def _allocated(self, output: OutputTensor, count: int) -> Sequence[Tensor]:
        """``count`` new tensors like ``output``. On GPUs small ones share memory, as the allocator takes longer than
        the wire; they are cut out without the memory of being parts of one tensor. To pickle one writes all of it."""
        like, num_bytes = self._like[output.dtype], output.num_bytes
        is_small = like.is_cuda and 0 < num_bytes <= SLAB and num_bytes % ALIGNMENT == 0
        each = SLAB // num_bytes if is_small else 1
        found: list[Tensor] = []
        while (left := count - len(found)) > 0:
            rows, *others = output.shape
            slab = like.new_empty((min(left, each) * rows, *others))
            found += slab.unsafe_split(rows) if left > 1 and each > 1 else [slab]
        return found

    def lend(self, step: Step, windows: Tensor) -> None:
        """Give out what lies whole in windows from there."""
        for number, start in step.lent:
            output = self._outputs[number]
            view = windows[start : start + output.num_bytes].view(output.dtype)
            self._open[number] = view.view(output.shape)

    def closed(self, message: Message) -> Iterator[tuple[str, Tensor]]:
        """The tensors that are complete with a message; they are the caller's from here."""
        for number in message.done:
            output = self._outputs[number]
            tensor = self._open.pop(number, None)
            if tensor is None:  # a slice of nothing
                tensor = self._like[output.dtype].new_empty(output.shape)
            name = output.name
            if output.copies:  # made before the caller has the tensor
                *others, name = name, *output.copies
                yield from ((other, tensor.clone()) for other in others)
            yield name, tensor

    def clear(self) -> None:
        """Let go of all of them."""
        self._open.clear()
