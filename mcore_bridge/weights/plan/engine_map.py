"""Engine maps: the slices of HF tensors that make up each tensor of an engine. Made once, they are kept in a file.

A map belongs to one rank of one engine. It depends on the names, shapes and dtypes of HF tensors, but not on the family
or on a trainer's mesh. This module needs torch only, since an engine's process imports it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

import torch

from mcore_bridge.arguments import given_path
from mcore_bridge.errors import TransferError
from mcore_bridge.foreign_files import parse, read_bounded
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.plan.boxes import BoxCopy, Dim, are_apart

_MOST_BYTES = 1 << 30
FORMAT = "mcore_bridge engine map 1"
"""The first line of a file, with the version of the format."""


@dataclass(frozen=True, slots=True)
class EngineTensor:
    """A tensor of the engine when the map was made."""

    name: str
    """The engine's name of the tensor."""
    shape: tuple[int, ...]
    """Its shape."""
    strides: tuple[int, ...]
    """Its strides in memory, in elements."""
    dtype: torch.dtype
    """Its dtype."""
    kept: int = field(default=0, compare=False)
    """The number of elements that the engine's loader does not write."""

    @property
    def span(self) -> int:
        """Elements from the first to the last in memory, gaps included."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))


@dataclass(frozen=True, slots=True)
class SliceCopy:
    """A slice of an HF tensor that becomes a slice of an engine's tensor."""

    hf: str
    """The name of the HF tensor."""
    tensor: str
    """The engine's name of its tensor."""
    box: BoxCopy
    """Both slices, in elements from the first one of each tensor. The HF tensor is contiguous."""
    casts: bool = False
    """Whether values are converted to the engine's dtype; otherwise bits are copied."""


@dataclass(frozen=True, slots=True)
class SliceFill:
    """Elements of an engine's tensor that do not depend on the weights, such as padding.

    They are written before any copy, and a copy may write over some of them.
    """

    tensor: str
    """The engine's name of the tensor."""
    box: BoxCopy
    """The elements, counted from the first one of the tensor."""
    bits: int
    """The pattern of one element."""


@dataclass(frozen=True, slots=True)
class Uncovered:
    """A tensor of the engine that is not made of slices: only the engine's loader can make it from these HF tensors."""

    tensor: str
    """The engine's name of the tensor."""
    reason: str
    """Why it is not made of slices."""
    hf: tuple[str, ...]
    """The names of the HF tensors."""


@dataclass(frozen=True)
class EngineMap:
    """The slices that make the tensors of one rank of an engine out of the HF tensors of a checkpoint.

    Args:
        engine: a line that identifies the rank: engine, release, model, place in the engine's mesh.
        sources: the HF tensors that the engine's loader was given.
        tensors: the engine's tensors that depend on them.
        copies, fills: the slices of tensors that the map covers.
        uncovered: the tensors that only the engine's loader can write.
        aliases: other names in the engine for memory of ``tensors``: the name, the tensor, and the index of its first
            element there.

    Example:
        >>> head = torch.nn.Linear(48, 96, bias=False)
        >>> load_weights = lambda pairs: head.weight.data.copy_(dict(pairs)["lm_head.weight"])
        >>> engine = engines.map_engine(mb.manifest(models), head, load_weights, engine="example")
        >>> engine.map.save("engine.json")
        >>> engines.EngineMap.load("engine.json").digest == engine.map.digest
        True
    """

    engine: str
    sources: tuple[TensorSpec, ...]
    tensors: tuple[EngineTensor, ...]
    copies: tuple[SliceCopy, ...]
    fills: tuple[SliceFill, ...] = ()
    uncovered: tuple[Uncovered, ...] = ()
    aliases: tuple[tuple[str, str, int], ...] = ()

    def __post_init__(self) -> None:
        """Convert to plain specs, as a loaded file has them: specs of a ``Manifest`` are not equal to plain ones."""
        plain = tuple(TensorSpec.of(spec.name, spec) for spec in self.sources)
        object.__setattr__(self, "sources", plain)

    def __hash__(self) -> int:
        """The hash of the digest: the fields of a large model have many thousands of entries."""
        return hash(self.digest)

    @cached_property
    def by_hf(self) -> dict[str, tuple[SliceCopy, ...]]:
        """The copies of each HF tensor that has any."""
        grouped: dict[str, list[SliceCopy]] = {}
        for copy in self.copies:
            grouped.setdefault(copy.hf, []).append(copy)
        return {hf: tuple(copies) for hf, copies in grouped.items()}

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each of the engine's tensors."""
        return {tensor.name: tensor.dtype for tensor in self.tensors}

    @cached_property
    def spans(self) -> dict[str, int]:
        """Elements from the first to the last of each of the engine's tensors."""
        return {tensor.name: tensor.span for tensor in self.tensors}

    @cached_property
    def places(self) -> dict[str, int]:
        """The number of each of the engine's tensors."""
        return {tensor.name: place for place, tensor in enumerate(self.tensors)}

    @cached_property
    def by_loader(self) -> frozenset[str]:
        """The HF tensors that the engine's loader still gets, for tensors that the map does not cover."""
        return frozenset(hf for entry in self.uncovered for hf in entry.hf)

    @cached_property
    def unused(self) -> tuple[str, ...]:
        """The HF tensors that this rank does not use, such as layers of another stage."""
        used = self.by_hf.keys() | self.by_loader
        return tuple(spec.name for spec in self.sources if spec.name not in used)

    @property
    def num_elements(self) -> int:
        """Elements that copies write."""
        return sum(copy.box.num_elements for copy in self.copies)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the whole map, as hexadecimal digits."""
        return hashlib.sha256(self._json().encode()).hexdigest()

    def differences(self, sources: Iterable[TensorSpec]) -> list[str]:
        """A line for each HF tensor that only the map or only ``sources`` has, or whose shape or dtype differs."""
        mine = {spec.name: (spec.shape, spec.dtype) for spec in self.sources}
        theirs = {spec.name: (tuple(spec.shape), spec.dtype) for spec in sources}
        return [
            f"{name}: expected {mine.get(name, 'no such HF tensor')}, found {theirs.get(name, 'none')}"
            for name in {**mine, **theirs}
            if mine.get(name) != theirs.get(name)
        ]

    def problems(self, device: torch.device | str = "cpu") -> list[str]:
        """Check the map itself: slices out of bounds, and elements that two copies or none write.

        Args:
            device: the device for the check, which takes one byte per element of one tensor at a time.

        Returns:
            A line for each contradiction.
        """
        specs = {spec.name: torch.Size(spec.shape).numel() for spec in self.sources}
        wrong = []
        left_out = {entry.tensor for entry in self.uncovered}
        boxes: dict[str, list[BoxCopy]] = {}
        for copy in self.copies:
            box = copy.box
            if box.is_within(specs.get(copy.hf, 0), self.spans.get(copy.tensor, 0)):
                boxes.setdefault(copy.tensor, []).append(box)
            else:
                wrong.append(f"{copy.hf} to {copy.tensor}: {box} is out of bounds")
        fills: dict[str, list[BoxCopy]] = {}
        for entry in self.fills:
            if entry.box.is_within(entry.box.source_end, self.spans.get(entry.tensor, 0)):
                fills.setdefault(entry.tensor, []).append(entry.box)
            else:
                wrong.append(f"{entry.tensor}: the fill {entry.box} is out of bounds")
        for tensor in (tensor for tensor in self.tensors if tensor.name not in left_out):
            num_written, alike = _count(tensor, boxes.get(tensor.name, ()), fills.get(tensor.name, ()), device)
            if alike:
                wrong.append(f"{tensor.name}: two copies write the same elements")
            expected = math.prod(tensor.shape) - tensor.kept
            if num_written != expected:
                wrong.append(f"{tensor.name}: expected {expected} elements that are written, found {num_written}")
        names = {tensor.name for tensor in self.tensors}
        unknown = {copy.tensor for copy in self.copies} | {entry.tensor for entry in self.fills}
        return wrong + [f"{name}: the map copies into it but does not describe it" for name in sorted(unknown - names)]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the map to a file, with its format and its digest."""
        given_path(path, TransferError).write_text(f"{FORMAT}\n{self.digest}\n{self._json()}\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> EngineMap:
        """The inverse of ``save``.

        Raises:
            TransferError: when the file has another format, or was changed after it was written.
        """
        path = given_path(path, TransferError)
        text = read_bounded(path, _MOST_BYTES, TransferError).decode(errors="replace")
        form, _, rest = text.partition("\n")
        digest, _, body = rest.partition("\n")
        if form != FORMAT:
            raise TransferError(
                f"{path}: expected a file that begins with {FORMAT!r}, found {form[:60]!r}; make another"
            )
        if hashlib.sha256(body.rstrip("\n").encode()).hexdigest() != digest:
            raise TransferError(
                f"{path}: expected the digest of its text, found another; the file was changed, so make another map"
            )
        try:
            return _read(parse(body.encode()))
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise TransferError(
                f"{path}: expected the fields of a map, found others ({error!r:.200}); make another"
            ) from None

    def _json(self) -> str:
        return json.dumps(
            {
                "engine": self.engine,
                "sources": [[s.name, list(s.shape), _name(s.dtype)] for s in self.sources],
                "tensors": [[t.name, list(t.shape), list(t.strides), _name(t.dtype), t.kept] for t in self.tensors],
                "copies": [[c.hf, c.tensor, _row(c.box), c.casts] for c in self.copies],
                "fills": [[f.tensor, _row(f.box), f.bits] for f in self.fills],
                "uncovered": [[u.tensor, u.reason, list(u.hf)] for u in self.uncovered],
                "aliases": [list(alias) for alias in self.aliases],
            },
            separators=(",", ":"),
        )


def _count(
    tensor: EngineTensor, copies: Sequence[BoxCopy], fills: Sequence[BoxCopy], device: torch.device | str
) -> tuple[int, bool]:
    """How many elements are written, and whether two copies write one element."""
    if are_apart([*copies, *fills]):
        return sum(box.num_elements for box in (*copies, *fills)), False
    count = torch.zeros(tensor.span, dtype=torch.uint8, device=device)
    for box in copies:
        box.target_in(count).add_(1)
    is_twice = bool((count > 1).any())
    for box in fills:
        box.target_in(count).fill_(1)
    return int(count.count_nonzero()), is_twice


def _row(box: BoxCopy) -> list[Any]:
    return [box.source, box.target, [list(dim) for dim in box.dims]]


def _box(row: list[Any]) -> BoxCopy:
    box = BoxCopy(row[0], row[1], tuple(Dim(*dim) for dim in row[2]))
    if not all(type(number) is int for number in (box.source, box.target, *chain.from_iterable(box.dims))):
        raise ValueError(f"{row} is no box")
    return box


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch.{name} is no dtype")
    return dtype


def _read(data: dict[str, Any]) -> EngineMap:
    return EngineMap(
        data["engine"],
        tuple(TensorSpec(name, tuple(shape), _dtype(dtype)) for name, shape, dtype in data["sources"]),
        tuple(EngineTensor(n, tuple(sh), tuple(st), _dtype(dt), kept) for n, sh, st, dt, kept in data["tensors"]),
        tuple(SliceCopy(hf, tensor, _box(row), casts) for hf, tensor, row, casts in data["copies"]),
        tuple(SliceFill(tensor, _box(row), bits) for tensor, row, bits in data["fills"]),
        tuple(Uncovered(tensor, reason, tuple(hf)) for tensor, reason, hf in data["uncovered"]),
        tuple((name, tensor, start) for name, tensor, start in data["aliases"]),
    )
