"""The slices of HF tensors that one rank of an engine uses, and the rank's map if only these slices are sent.

Trainer and engine each compute the slices from the map. The shapes of sent tensors show along which dims they were cut.
This module needs torch and numpy only, since an engine's process imports it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from mcore_bridge.errors import TransferError
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.plan.boxes import BoxCopy
from mcore_bridge.weights.plan.engine_map import EngineMap, SliceCopy

Indices = np.ndarray[tuple[int], np.dtype[np.int64]]


class MapSlices:
    """The parts of each HF tensor that the copies of a map read, along any dim."""

    def __init__(self, engine_map: EngineMap) -> None:
        self._map = engine_map
        self._shapes = {spec.name: tuple(spec.shape) for spec in engine_map.sources}
        self._known: dict[tuple[object, ...], Indices] = {}

    def is_used(self, hf: str) -> bool:
        """Whether the engine's rank needs any element of an HF tensor."""
        return hf in self._map.by_hf or hf in self._map.by_loader

    def taken(self, hf: str, dims: Sequence[int]) -> tuple[Indices, ...]:
        """For each of ``dims``, the used indices along it, ascending; all indices if no slice is enough."""
        shape = self._shapes[hf]
        if len(shape) in dims:  # a number alone, or one for each expert: plans count it as a row of one element
            return *self.taken(hf, [dim for dim in dims if dim < len(shape)]), np.arange(1)
        taken = tuple(self._indices(hf, dim) for dim in dims)
        try:
            self._cut(hf, dict(zip(dims, taken, strict=True)))
        except ValueError:
            return tuple(np.arange(shape[dim]) for dim in dims)
        return taken

    def narrowed(self, specs: Iterable[TensorSpec]) -> EngineMap:
        """The map for the sent tensors, which may be slices of the HF tensors for which the map was made.

        Raises:
            TransferError: when a used tensor is missing, or has another dtype or a shape that no slice has.
        """
        sent = tuple(TensorSpec.of(spec.name, spec) for spec in specs)
        if not self._map.differences(sent):  # in any order
            return self._map
        names = {spec.name for spec in sent}
        wrong = [
            f"{name}: expected it, found none" for name in self._shapes if self.is_used(name) and name not in names
        ]
        dtypes = {spec.name: spec.dtype for spec in self._map.sources}
        copies: list[SliceCopy] = []
        for spec in sent:
            if dtypes.get(spec.name) != spec.dtype:
                wrong.append(f"{spec.name}: expected {dtypes.get(spec.name, 'no such HF tensor')}, found {spec.dtype}")
                continue
            try:
                copies += self._of(spec)
            except ValueError as error:
                wrong.append(f"{spec.name}: {error}")
        if wrong:
            raise TransferError(
                f"the map was made for other HF tensors: {'; '.join(wrong[:8])} ({len(wrong)} in all); make another"
            )
        return replace(self._map, sources=sent, copies=tuple(copies))

    def _of(self, spec: TensorSpec) -> Sequence[SliceCopy]:
        whole = self._shapes[spec.name]
        if len(whole) != len(spec.shape):
            raise ValueError(f"expected the shape {whole} or a slice of it, found {spec.shape}")
        dims = [dim for dim, size in enumerate(whole) if spec.shape[dim] != size]
        taken = {dim: self._indices(spec.name, dim) for dim in dims}
        sizes = tuple(len(taken[dim]) if dim in taken else size for dim, size in enumerate(whole))
        if sizes != spec.shape:
            raise ValueError(f"expected the shape {whole}, or {sizes} of its slices, found {spec.shape}")
        return self._cut(spec.name, taken)

    def _cut(self, hf: str, taken: Mapping[int, Indices]) -> Sequence[SliceCopy]:
        """The copies from an HF tensor of which only the indices ``taken`` along some dims were sent.

        Raises:
            ValueError: when a copy cannot be expressed in the sent part.
        """
        shape, copies = self._shapes[hf], self._map.by_hf.get(hf, ())
        for dim, indices in taken.items():
            if len(indices) < shape[dim]:
                places = [_place(shape, dim, len(indices), run) for run in _runs(indices)]
                cut = [(copy, copy.box.after(place)) for copy in copies for place in places]
                cut_copies = tuple(replace(copy, box=box) for copy, box in cut if box is not None)
                if sum(c.box.num_elements for c in cut_copies) != sum(c.box.num_elements for c in copies):
                    raise ValueError("its slices lack elements that are copied")
                shape, copies = (*shape[:dim], len(indices), *shape[dim + 1 :]), cut_copies
        return copies

    def _indices(self, hf: str, dim: int) -> Indices:
        shape = self._shapes[hf]
        if hf in self._map.by_loader:
            return np.arange(shape[dim])
        boxes = [copy.box for copy in self._map.by_hf.get(hf, ())]
        key = (shape, dim, *((box.source, *((size, near) for size, near, _ in box.dims)) for box in boxes))
        if key not in self._known:
            self._known[key] = _read(boxes, shape, dim)
        return self._known[key]


def _read(boxes: Sequence[BoxCopy], shape: Sequence[int], dim: int) -> Indices:
    is_read = np.zeros(shape[dim], dtype=bool)
    for box in boxes:
        indices = _read_by(box, math.prod(shape[dim + 1 :]), shape[dim])
        is_read[slice(None) if indices is None else indices] = True
    return np.flatnonzero(is_read)


def _read_by(box: BoxCopy, inner: int, size: int) -> Indices | None:
    """The indices that a box reads along a dim of ``size`` with stride ``inner``; None if they cannot be determined."""
    indices, rest = np.array([box.source // inner]), box.source % inner
    for count, stride in ((dim.size, dim.source) for dim in box.dims if dim.source):
        if stride < inner:
            within = min(count, inner // stride)
            if inner % stride or count % within:
                return None
            rest, count, stride = rest + (within - 1) * stride, count // within, inner
        if stride % inner:
            return None
        indices = np.unique((indices[:, None] + np.arange(count) * (stride // inner)) % size)
    return indices % size if rest < inner else None


def _runs(indices: Indices) -> list[tuple[int, int, int]]:
    """``(place, first, size)`` of each run of consecutive indices."""
    edges = [0, *(np.flatnonzero(np.diff(indices) != 1) + 1).tolist(), len(indices)]
    return [(start, int(indices[start]), end - start) for start, end in pairwise(edges) if start < end]


def _place(shape: Sequence[int], dim: int, num_there: int, run: tuple[int, int, int]) -> BoxCopy:
    """The copy of a run of indices from the sent slices to its place in the whole tensor."""
    place, first, size = run
    there = (*shape[:dim], num_there, *shape[dim + 1 :])
    near, far = (_strides(sizes) for sizes in (there, shape))
    sizes = (*shape[:dim], size, *shape[dim + 1 :])
    return BoxCopy.of(place * near[dim], sizes, near, first * far[dim], far)


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
