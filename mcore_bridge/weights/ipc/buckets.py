"""The plan of a transfer to another process: which tensors share a slot, and at which byte each tensor begins.

A plan is made from a manifest, before memory is allocated and before weights move. Both processes hold the same plan,
so later they exchange only numbers of buckets. This module needs only torch: an engine's process imports it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby

from torch import Tensor

from mcore_bridge.arguments import COUNT, ITERABLE, Kind, require
from mcore_bridge.errors import TransferError
from mcore_bridge.rules.names import fused_module
from mcore_bridge.rules.scheme import stem_of
from mcore_bridge.rules.spec import ALIGNMENT, TensorSpec, aligned

SLOT_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class BucketEntry(TensorSpec):
    """One HF tensor in a slot: contiguous, from byte ``offset`` on, which is a multiple of ``ALIGNMENT``."""

    offset: int
    """The first byte of the tensor in the slot."""

    def view(self, slot: Tensor) -> Tensor:
        """The tensor, as a view of ``slot`` (uint8 [bytes])."""
        return slot[self.offset : self.offset + self.num_bytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class Bucket:
    """The tensors that lie in a slot at one time."""

    number: int
    """The index among the buckets of the plan. A ``Receiver`` needs nothing else."""
    slot: int
    """The number of its slot."""
    pieces: tuple[BucketEntry, ...]
    """The HF tensors in it, in the order of the manifest."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the slot that the tensors take, gaps included."""
        last = self.pieces[-1]
        return last.offset + aligned(last.num_bytes)

    def columns(self) -> dict[str, list[object]]:
        """The entries as plain lists, for other receivers: names, dtypes as ``"bfloat16"``, shapes, bytes."""
        return {
            "names": [piece.name for piece in self.pieces],
            "dtypes": [str(piece.dtype).removeprefix("torch.") for piece in self.pieces],
            "shapes": [list(piece.shape) for piece in self.pieces],
            "offsets": [piece.offset for piece in self.pieces],
            "num_bytes": [piece.num_bytes for piece in self.pieces],
        }


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """All buckets, in the order in which they are sent. They use the slots one after the other."""

    num_slots: int
    """The number of slots."""
    slot_bytes: int
    """Bytes of each slot."""
    buckets: tuple[Bucket, ...]
    """The buckets, by number."""
    target: str = ""
    """The digest of the engine map whose slices are sent; empty for whole HF tensors."""

    def digest(self) -> str:
        """A digest that is equal for equal plans, in every process."""
        pieces = (piece for bucket in self.buckets for piece in bucket.pieces)
        entries = [(piece.name, piece.dtype, tuple(piece.shape), piece.offset) for piece in pieces]
        whole = (self.num_slots, self.slot_bytes, [len(bucket.pieces) for bucket in self.buckets], entries, self.target)
        return hashlib.sha256(repr(whole).encode()).hexdigest()


_GROUPS = Kind(
    "groups of names",
    lambda value: all(map(ITERABLE.is_good, value)),  # type: ignore[call-overload]
    "pass a list of lists of names",
)


def plan_buckets(
    manifest: Iterable[TensorSpec],
    *,
    num_slots: int = 2,
    slot_bytes: int | None = None,
    together: Iterable[Collection[str]] = (),
) -> BucketPlan:
    """Distribute the tensors of a manifest, in its order, over slots of one size.

    Projections of one input (q, k and v; gate and up) always share a slot, because engines fuse them. So do the codes
    and scales of a weight. The experts of a layer share a slot if it holds them all.

    Args:
        manifest: names, shapes and dtypes in the order in which the tensors will come, such as ``mb.manifest(models)``
            for ``mb.iter_hf_weights(models)``.
        num_slots: the number of slots. With two, one is filled while the other is read.
        slot_bytes: bytes of a slot; ``num_slots`` times as many are allocated. None means 512 MiB, less for a smaller
            model, and more for a larger tensor or group.
        together: further groups of names that must share a slot. Tensors between the first and the last of a group in
            the manifest travel with them.

    Returns:
        The buckets, each with its slot and the places of its tensors.

    Raises:
        TransferError: when a tensor or group is larger than ``slot_bytes``, a group names a tensor that the manifest
            lacks, or the manifest has a tensor twice.

    Example:
        >>> plan = engines.plan_buckets(mb.manifest(models), num_slots=2)
        >>> plan.num_slots, len(plan.buckets)
        (2, 1)
    """
    require(
        TransferError,
        manifest=(manifest, ITERABLE),
        num_slots=(num_slots, COUNT),
        slot_bytes=(slot_bytes, COUNT.or_none()),
        together=(together, ITERABLE),
    )
    together = [*together]
    require(TransferError, together=(together, _GROUPS))
    specs = tuple(manifest)
    if other := next((entry for entry in specs if not isinstance(entry, TensorSpec)), None):
        raise TransferError(f"expected a manifest, found a {type(other).__name__} in it: pass manifest(models)")
    runs = list(_runs(specs, (*_fused(specs), *together)))
    largest = max(runs, key=_size, default=())
    if slot_bytes is None:
        slot_bytes = max(_size(largest), min(SLOT_BYTES, sum(map(_size, runs))), ALIGNMENT)
    if _size(largest) > slot_bytes:
        names = " to ".join(dict.fromkeys((largest[0].name, largest[-1].name)))
        raise TransferError(
            f"{names} takes {_size(largest)} bytes, and a slot has {slot_bytes}; pass slot_bytes={_size(largest)} or "
            "more, or None"
        )
    filled = enumerate(_fill(_in_layers(runs, slot_bytes), slot_bytes))
    buckets = tuple(Bucket(i, i % num_slots, pieces) for i, pieces in filled)
    return BucketPlan(num_slots, slot_bytes, buckets, getattr(manifest, "target", ""))


def _fused(specs: Iterable[TensorSpec]) -> Iterable[Collection[str]]:
    """Names that an engine needs at once: projections of one input, and the codes and scales of a weight."""
    groups: dict[str, list[str]] = {}
    for spec in specs:
        groups.setdefault(fused_module(spec.name) or stem_of(spec.name), []).append(spec.name)
    return groups.values()


def _runs(specs: Sequence[TensorSpec], together: Iterable[Collection[str]]) -> Iterator[Sequence[TensorSpec]]:
    """Cut the manifest into the smallest runs of tensors that have to stay together."""
    index_of = {spec.name: index for index, spec in enumerate(specs)}
    if len(index_of) < len(specs):
        twice = sorted({spec.name for index, spec in enumerate(specs) if index_of[spec.name] != index})
        raise TransferError(f"expected each tensor once, found {twice} more often; rename or leave out the copies")
    last_with = list(range(len(specs)))
    for group in together:
        if unknown := sorted(set(group) - index_of.keys()):
            raise TransferError(f"the group {sorted(group)} names {unknown}, which the manifest lacks; leave them out")
        if group:
            first = min(index_of[name] for name in group)
            last_with[first] = max(last_with[first], *(index_of[name] for name in group))
    start, last = 0, -1
    for index in range(len(specs)):
        if index > last and index > start:
            yield specs[start:index]
            start = index
        last = max(last, last_with[index])
    if specs:
        yield specs[start:]


def _in_layers(runs: Iterable[Sequence[TensorSpec]], slot_bytes: int) -> Iterator[Sequence[TensorSpec]]:
    """Join the experts of a layer into one run, if they are consecutive and one slot holds them all."""
    for layer, neighbours in groupby(runs, lambda run: run[0].name.rpartition(".experts.")[0]):
        of_layer = list(neighbours)
        fits = layer and sum(map(_size, of_layer)) <= slot_bytes
        yield from [list(chain.from_iterable(of_layer))] if fits else of_layer


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
