"""Copies from a group of HF tensors by an engine map: prepared once as lists or as a table, then run together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from mcore_bridge.errors import TransferError
from mcore_bridge.rules.spec import Pair, TensorSpec
from mcore_bridge.weights.plan.boxes import ByteCopy, stacked
from mcore_bridge.weights.plan.engine_map import EngineMap, EngineTensor
from mcore_bridge.weights.transfer.copier import WORDS, Buffers, CopyTable, has_triton


def require_expected(pairs: Iterable[Pair], expected: Mapping[str, TensorSpec]) -> None:
    """Raise ``TransferError`` for a tensor with another shape, dtype or device than a round or a map expects."""
    for name, tensor in pairs:
        spec = expected.get(name)
        if spec is None or (tuple(spec.shape), spec.dtype) != (tuple(tensor.shape), tensor.dtype) or tensor.is_meta:
            wanted = "no such tensor" if spec is None else f"{spec.dtype} {tuple(spec.shape)}"
            actual = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
            raise TransferError(
                f"{name} came as {actual}, expected {wanted}, or it comes twice; make the map and the plan from the "
                "manifest of these tensors"
            )


def take_expected(pairs: Iterable[Pair], due: dict[str, TensorSpec]) -> None:
    """Remove tensors from ``due`` that have arrived. Raise as ``require_expected``, also for a second copy."""
    for name, tensor in pairs:
        require_expected([(name, tensor)], due)
        del due[name]


class _Ready(NamedTuple):
    """The prepared data of one run: buffers for the kernel if it has work, and views for all other copies."""

    group: Sequence[Pair]
    targets: Buffers
    by_kernel: Buffers | None
    far: list[Tensor]
    near: list[Tensor]


class GroupCopies:
    """The copies from one group of HF tensors.

    Args:
        engine_map: the map of these HF tensors.
        group: pairs of an HF name and a tensor. Later groups must have equal names and dtypes.
    """

    def __init__(self, engine_map: EngineMap, group: Sequence[Pair]) -> None:
        self._map, self._names = engine_map, [name for name, _ in group]
        entries = [  # a copy, and the number of its HF tensor in the group, with its dtype
            (copy, number, tensor.dtype)
            for number, (name, tensor) in enumerate(group)
            for copy in engine_map.by_hf.get(name, ())
        ]
        self._casts = [entry for entry in entries if entry[0].casts]
        self._moved = [entry for entry in entries if not entry[0].casts]
        self._ready: _Ready | None = None

    def fits(self, group: Sequence[Pair]) -> bool:
        """Whether these copies were prepared for ``group``."""
        is_last = self._ready is not None and self._ready.group is group
        return is_last or self._names == [name for name, _ in group]

    def run(self, group: Sequence[Pair], targets: Buffers, *, by_kernel: bool = True, stay: bool = False) -> None:
        """Copy on the current stream, without waiting: on a GPU by one kernel and one more call for casts.

        Args:
            group: the HF tensors, contiguous.
            targets: the memory of the engine's tensors in the order of the map, uint8 [bytes] each.
            by_kernel: False copies without the kernel: a single run is not worth the time to make its table.
            stay: whether later calls pass this list object again, with tensors in unchanged memory.
        """
        ready = self._ready
        if ready is None or ready.group is not group or ready.targets is not targets:
            ready = self._prepared(group, targets, by_kernel)
            self._ready = ready if stay else None
        if ready.by_kernel:
            self._table.run(ready.by_kernel, Buffers([]), group[0][1].device)
        if ready.far:
            torch._foreach_copy_(ready.far, ready.near)

    def _prepared(self, group: Sequence[Pair], targets: Buffers, by_kernel: bool) -> _Ready:
        sources = [tensor.detach() for _, tensor in group]
        by_kernel = by_kernel and bool(self._moved) and sources[0].is_cuda and targets.on_gpu and has_triton()
        buffers = Buffers([*targets.tensors, *sources]) if by_kernel else None
        near, far = [], []
        for copy, number, dtype in self._casts if by_kernel else [*self._moved, *self._casts]:
            memory = targets.tensors[self._map.places[copy.tensor]]
            words = (dtype, self._map.dtypes[copy.tensor]) if copy.casts else (WORDS[dtype.itemsize],) * 2
            near.append(copy.box.source_in(sources[number].view(words[0])))
            far.append(copy.box.target_in(_elements(memory, words[1])))
        return _Ready(group, targets, buffers, far, near)

    @cached_property
    def _table(self) -> CopyTable:
        places = self._map.places
        moves = (
            ByteCopy.of(copy.box, dtype.itemsize, source=len(places) + number, target=places[copy.tensor])
            for copy, number, dtype in self._moved
        )
        return CopyTable(stacked(chain.from_iterable(moves)))


class MapCopies:
    """The copies of a map, group by group. The copies of a group are kept for later groups of these HF tensors."""

    def __init__(self, engine_map: EngineMap) -> None:
        self._map = engine_map
        self._groups: dict[str, GroupCopies] = {}

    def run(self, group: Sequence[Pair], targets: Buffers, *, stay: bool = False) -> None:
        """As ``GroupCopies.run``."""
        if not group:
            return
        copies = self._groups.get(group[0][0])
        if copies is None or not copies.fits(group):
            copies = self._groups[group[0][0]] = GroupCopies(self._map, group)
        copies.run(group, targets, stay=stay)


def octets(tensor: Tensor) -> Tensor:
    """The memory of ``tensor`` from its first element to its last, uint8 [bytes]."""
    item = tensor.element_size()
    num_bytes = EngineTensor("", tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype).span * item
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), tensor.storage_offset() * item, (num_bytes,), (1,))


def _elements(memory: Tensor, dtype: torch.dtype) -> Tensor:
    """A memory (uint8 [bytes]) as whole elements."""
    return memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype)


class Constants:
    """The constants that a map writes, such as padding.

    Args:
        engine_map: the map.
    """

    def __init__(self, engine_map: EngineMap) -> None:
        self._map = engine_map
        self._targets: Buffers | None = None
        self._views: dict[tuple[torch.dtype, int], list[Tensor]] = {}

    def write(self, targets: Buffers) -> None:
        """Write them into the memory of an engine's tensors, uint8 [bytes] each, in the order of the map."""
        if targets is not self._targets:
            self._targets, self._views = targets, {}
            for entry in self._map.fills:
                word = WORDS[self._map.dtypes[entry.tensor].itemsize]
                memory = _elements(targets.tensors[self._map.places[entry.tensor]], word)
                over = torch.iinfo(word).max + 1
                value = entry.bits if entry.bits < over else entry.bits - 2 * over
                self._views.setdefault((word, value), []).append(entry.box.target_in(memory))
        for (_, value), views in self._views.items():
            torch._foreach_zero_(views)
            if value:
                torch._foreach_add_(views, value)
