"""The copies of an engine map between tensors that are there: made once into lists or tables, then run at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from mcore_bridge.errors import TransferError
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.ipc.engine_tensors import octets
from mcore_bridge.weights.plan.boxes import BoxCopy
from mcore_bridge.weights.plan.engine_map import SliceCopy, SliceFill
from mcore_bridge.weights.transfer.byte_copy import ByteCopy
from mcore_bridge.weights.transfer.copier import WORDS, Buffers, CopyTable, has_triton
from mcore_bridge.weights.transfer.rectangles import rectangles, stacked


class EngineCopies:
    """What is copied out of one flat buffer into the tensors of an engine.

    Args:
        copies: slice copies, and the byte at which the HF tensor of each begins in the buffer, with its dtype.
            If ``apart``, the number of its HF tensor instead, each of which is a buffer of its own.
        dtypes: those of the engine's tensors.
        places: the number of each of the engine's tensors among the buffers that are given to ``run``.
    """

    def __init__(
        self,
        copies: Sequence[tuple[SliceCopy, int, torch.dtype]],
        dtypes: Mapping[str, torch.dtype],
        places: Mapping[str, int],
        *,
        apart: bool = False,
    ) -> None:
        self._apart = apart
        self._casts = [entry for entry in copies if entry[0].casts]
        self._moved = [entry for entry in copies if not entry[0].casts]
        self._dtypes, self._places = dtypes, places
        self._lists: tuple[int, Buffers | None, list[Tensor], list[Tensor]] = (0, None, [], [])
        self._buffer: Buffers | None = None

    def run(self, buffer: Tensor, targets: Buffers) -> None:
        """Copy on the current stream, without waiting: on a GPU by one kernel and one more call for casts.

        Args:
            buffer: uint8 [bytes], contiguous.
            targets: the memory of the engine's tensors, uint8 [bytes] each.
        """
        by_kernel = buffer.is_cuda and targets.on_gpu and has_triton()
        if by_kernel and self._moved:
            if self._buffer is None or self._buffer.tensors[0].data_ptr() != buffer.data_ptr():
                self._buffer = Buffers([buffer])  # whose address is on the GPU from then on
            self._table.run(targets, self._buffer, buffer.device)
        if self._lists[0] != buffer.data_ptr() or self._lists[1] is not targets:
            entries = self._casts if by_kernel else [*self._moved, *self._casts]
            self._lists = (buffer.data_ptr(), targets, *self._views(entries, buffer, targets))
        if self._lists[2]:
            torch._foreach_copy_(self._lists[2], self._lists[3])

    def run_once(self, buffer: Tensor, targets: Buffers) -> None:
        """The same without the kernel, whose tables are not worth their making for one time."""
        far, near = self._views([*self._moved, *self._casts], buffer, targets)
        if far:
            torch._foreach_copy_(far, near)

    def run_apart(self, sources: Sequence[Tensor], targets: Buffers) -> None:
        """The same for HF tensors that are buffers of their own, in the order of their numbers."""
        moved = self._moved
        if moved and sources[0].is_cuda and has_triton():
            self._table.run(Buffers([*targets.tensors, *sources]), Buffers([]), sources[0].device)
            moved = []
        far, near = [], []
        for entry in [*moved, *self._casts]:
            target, source = self._views([(entry[0], 0, entry[2])], octets(sources[entry[1]]), targets)
            far += target
            near += source
        if far:
            torch._foreach_copy_(far, near)

    @cached_property
    def _table(self) -> CopyTable:
        return CopyTable(stacked(self._moves()))

    def _moves(self) -> Iterator[ByteCopy]:
        for copy, start, dtype in self._moved:
            item, dims = dtype.itemsize, copy.box.dims
            number, first = (start, 0) if self._apart else (0, start)
            for move in rectangles(
                [dim.size for dim in dims],
                [dim.source * item for dim in dims],
                [dim.target * item for dim in dims],
                first + copy.box.source * item,
                copy.box.target * item,
                item,
            ):
                yield move._replace(source=len(self._places) + number, target=self._places[copy.tensor])

    def _views(
        self, entries: Iterable[tuple[SliceCopy, int, torch.dtype]], buffer: Tensor, targets: Buffers
    ) -> tuple[list[Tensor], list[Tensor]]:
        near, far = [], []
        for copy, start, dtype in entries:
            memory = targets.tensors[self._places[copy.tensor]]
            words = (dtype, self._dtypes[copy.tensor]) if copy.casts else (WORDS[dtype.itemsize],) * 2
            source, target = strided(buffer[start:], words[0], copy.box, "source"), memory
            near.append(source)
            far.append(strided(target, words[1], copy.box, "target"))
        return far, near


def require_expected(pairs: Iterable[tuple[str, Tensor]], expected: Mapping[str, TensorSpec]) -> None:
    """Raise ``TransferError`` for a tensor that is not as a round, or an engine's map, expects it."""
    for name, tensor in pairs:
        spec = expected.get(name)
        if spec is None or (tuple(spec.shape), spec.dtype) != (tuple(tensor.shape), tensor.dtype) or tensor.is_meta:
            wanted = "no such tensor" if spec is None else f"{spec.dtype} {tuple(spec.shape)}"
            actual = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
            raise TransferError(
                f"{name} came as {actual}, expected {wanted}, or it comes twice; make the map and the plan from the "
                "manifest of these tensors"
            )


def strided(memory: Tensor, dtype: torch.dtype, box: BoxCopy, side: str) -> Tensor:
    """The elements of a box in one of its two memories (uint8 [bytes]), as a view."""
    elements = memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    start, strides = (
        (box.source, [dim.source for dim in box.dims])
        if side == "source"
        else (box.target, [dim.target for dim in box.dims])
    )
    return elements.as_strided([dim.size for dim in box.dims], strides, elements.storage_offset() + start)


def fill(fills: Iterable[SliceFill], tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> None:
    """Write constants into the memory of an engine's tensors (uint8 [bytes] each)."""
    zeros = []
    for entry in fills:
        item = dtypes[entry.tensor].itemsize
        view = strided(tensors[entry.tensor], WORDS[item], entry.box, "target")
        if entry.bits:
            half = 1 << (8 * item - 1)
            view.fill_(entry.bits if item == 1 or entry.bits < half else entry.bits - 2 * half)
        else:
            zeros.append(view)
    if zeros:
        torch._foreach_zero_(zeros)
