"""Which tensors share a slot on their way to another process, and at which byte each lies: data, known up front.

A plan is made from a manifest, before any memory is taken and before any weight moves. Both sides hold the same plan,
so that all they say to each other later is the number of a bucket. Needs torch only: an engine's process imports it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby

from torch import Tensor

from mcore_bridge.errors import TransferError
from mcore_bridge.rules.fused_loads import fused_module
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.plan.alignment import ALIGNMENT, aligned

SLOT_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class BucketEntry(TensorSpec):
    """One HF tensor in a slot: contiguous, from byte ``offset`` on, a multiple of ``ALIGNMENT``."""

    offset: int

    def view(self, slot: Tensor) -> Tensor:
        """The tensor, as a view of ``slot`` (uint8 [bytes])."""
        return slot[self.offset : self.offset + self.num_bytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class Bucket:
    """What one filling of a slot holds."""

    number: int
    """Its place among the buckets of the plan, from 0: all that has to be said to a ``Receiver``."""
    slot: int
    pieces: tuple[BucketEntry, ...]

    def columns(self) -> dict[str, list[object]]:
        """The index as plain lists, for receivers that are not ours: names, dtypes as ``"bfloat16"``, shapes, bytes."""
        return {
            "names": [piece.name for piece in self.pieces],
            "dtypes": [str(piece.dtype).removeprefix("torch.") for piece in self.pieces],
            "shapes": [list(piece.shape) for piece in self.pieces],
            "offsets": [piece.offset for piece in self.pieces],
            "num_bytes": [piece.num_bytes for piece in self.pieces],
        }


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """All buckets, in the order in which they are sent. Slots are used in turn."""

    num_slots: int
    slot_bytes: int
    buckets: tuple[Bucket, ...]


def plan_buckets(
    manifest: Iterable[TensorSpec],
    *,
    num_slots: int = 2,
    slot_bytes: int | None = None,
    together: Iterable[Collection[str]] = (),
) -> BucketPlan:
    """Deal the tensors of a manifest, in its order, out to slots of one size.

    Args:
        manifest: names, shapes and dtypes in the order in which the tensors will come: ``mb.manifest(models)`` says
            those of ``mb.iter_hf_weights(models)``.
        num_slots: slots that are used in turn. With two, one is filled while the other is read.
        slot_bytes: bytes of a slot, all of which are allocated ``num_slots`` times. None is 512 MiB, less for a model
            that is smaller, and more for one with a larger tensor or group.
        together: groups of names that must share a slot, beside what engines fuse: projections of one input (q, k and
            v; gate and up), always, and the experts of a layer where a slot holds them all. What comes between the
            first and the last of a group in the manifest travels with them.

    Raises:
        TransferError: when a tensor or group is larger than ``slot_bytes``, when a group names what the manifest lacks,
            or the manifest a tensor twice.
    """
    if num_slots < 1:
        raise TransferError(f"expected one slot or more, found num_slots={num_slots}")
    specs = tuple(manifest)
    runs = list(_runs(specs, (*_fused(specs), *together)))
    largest = max(runs, key=_size, default=())
    if slot_bytes is None:
        slot_bytes = max(_size(largest), min(SLOT_BYTES, sum(map(_size, runs))), ALIGNMENT)
    if _size(largest) > slot_bytes:
        names = " to ".join(dict.fromkeys((largest[0].name, largest[-1].name)))
        raise TransferError(
            f"{names} takes {_size(largest)} bytes of one slot, and a slot has {slot_bytes}; pass "
            f"slot_bytes={_size(largest)} or more, or None"
        )
    filled = enumerate(_fill(_in_layers(runs, slot_bytes), slot_bytes))
    return BucketPlan(num_slots, slot_bytes, tuple(Bucket(i, i % num_slots, pieces) for i, pieces in filled))


def _fused(specs: Iterable[TensorSpec]) -> Iterable[Collection[str]]:
    groups: dict[str, list[str]] = {}
    for spec in specs:
        if module := fused_module(spec.name):
            groups.setdefault(module, []).append(spec.name)
    return groups.values()


def _runs(specs: Sequence[TensorSpec], together: Iterable[Collection[str]]) -> Iterator[Sequence[TensorSpec]]:
    """The manifest cut wherever nothing has to stay together."""
    places = {spec.name: place for place, spec in enumerate(specs)}
    if len(places) < len(specs):
        twice = sorted({spec.name for place, spec in enumerate(specs) if places[spec.name] != place})
        raise TransferError(f"expected each tensor once, found {twice} more often; rename or leave out the copies")
    last_with = list(range(len(specs)))
    for group in together:
        if unknown := sorted(set(group) - places.keys()):
            raise TransferError(f"the group {sorted(group)} names {unknown}, which the manifest lacks; leave those out")
        if group:
            first = min(places[name] for name in group)
            last_with[first] = max(last_with[first], *(places[name] for name in group))
    start, last = 0, -1
    for place in range(len(specs)):
        if place > last and place > start:
            yield specs[start:place]
            start = place
        last = max(last, last_with[place])
    if specs:
        yield specs[start:]


def _in_layers(runs: Iterable[Sequence[TensorSpec]], slot_bytes: int) -> Iterator[Sequence[TensorSpec]]:
    """The experts of a layer as one run, where they come one behind the other and a slot holds them all."""
    for layer, alike in groupby(runs, lambda run: run[0].name.rpartition(".experts.")[0]):
        found = list(alike)
        fits = layer and sum(map(_size, found)) <= slot_bytes
        yield from [list(chain.from_iterable(found))] if fits else found


def _fill(runs: Iterable[Sequence[TensorSpec]], slot_bytes: int) -> Iterator[tuple[BucketEntry, ...]]:
    pieces: list[BucketEntry] = []
    used = 0
    for run in runs:
        if pieces and used + _size(run) > slot_bytes:
            yield tuple(pieces)
            pieces, used = [], 0
        for spec in run:
            pieces.append(BucketEntry(spec.name, tuple(spec.shape), spec.dtype, used))
            used += aligned(spec.num_bytes)
    if pieces:
        yield tuple(pieces)


def _size(run: Sequence[TensorSpec]) -> int:
    return sum(aligned(spec.num_bytes) for spec in run)
