"""The receiver's side of a ring: views of the slots that a sender's process fills, checked against the plan. Needs
torch only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from mcore_bridge.arguments import instance_of, list_of, require
from mcore_bridge.errors import TransferError, plural
from mcore_bridge.rules.spec import ALIGNMENT, Pair
from mcore_bridge.weights.ipc.buckets import Bucket, BucketPlan
from mcore_bridge.weights.ipc.shared_memory import Handle, open_all

_PLAN = instance_of("the plan of a BufferRing", BucketPlan, advice="send ring.plan")
_HANDLES = list_of("what BufferRing.handles returned", Handle, advice="send ring.handles()")


class EngineInput(Protocol):
    """An object that copies the HF tensors of a round into an engine, such as a ``MappedEngine``."""

    def begin(self, plan: BucketPlan) -> None:
        """Announce a round of all HF tensors of ``plan``."""

    def write(self, pairs: list[Pair], *, stay: bool = False) -> None:
        """Copy ``pairs`` before this returns. ``stay``: later rounds pass this list again, in unchanged memory."""

    def complete(self, version: int | None = None) -> None:
        """End the round after all HF tensors have come."""

    def break_off(self) -> None:
        """Forget a round that did not end."""


class Receiver:
    """The slots of a sender's ``BufferRing``, opened in this process. They serve any number of rounds.

    Args:
        plan: the plan of the ring.
        handles: the result of ``BufferRing.handles`` for this process.

    Raises:
        TransferError: when plan and slots do not fit, or this process cannot open memory of the sender's GPU.

    Example:
        >>> ring = engines.BufferRing(engines.plan_buckets(mb.manifest(models)), device="cpu")
        >>> receiver = engines.Receiver(ring.plan, ring.handles())         # in the process of the engine
        >>> for bucket in ring.fill(mb.iter_hf_weights(models), acknowledged=lambda: "read"):
        ...     with receiver.open(bucket.number) as pairs:           # views of the slot: load them here
        ...         print(len(pairs))
        47
        >>> receiver.finish()
    """

    def __init__(self, plan: BucketPlan, handles: Sequence[Handle]) -> None:
        kinds = {"plan": (plan, _PLAN), "handles": (handles, _HANDLES)}
        require(TransferError, **kinds)
        _check(plan)
        self.plan = plan
        other = "expected the plan of the ring of these handles, found another one: send ring.plan with the handles"
        self._slots = open_all(handles, plan.digest(), other)
        sizes = [slot.numel() for slot in self._slots]
        if sizes != [plan.slot_bytes] * plan.num_slots:
            raise TransferError(f"expected {plan.num_slots} slots of {plan.slot_bytes} bytes, found slots of {sizes}")
        self._views: dict[int, list[Pair]] = {}
        self._next = 0
        self._engine: EngineInput | None = None

    @contextmanager
    def open(self, number: int) -> Iterator[list[Pair]]:
        """Yield the tensors of bucket ``number``, as views of its slot. They may be overwritten when the block ends.

        The end of the block waits for all work that was queued on the current stream. Then acknowledge the bucket.

        Raises:
            TransferError: when another bucket is due.
        """
        bucket, slot = self._due(number)
        yield _pairs(bucket, slot)
        self._read(number, slot)

    @torch.no_grad()
    def copy_into(self, number: int, engine: EngineInput) -> None:
        """Copy bucket ``number`` into the tensors of an engine by its map, without its loader.

        When this returns the slot may be overwritten, as after ``open``. ``engine.state`` is ``"half"`` from the first
        bucket on until ``finish``. If the map does not fit the engine or the plan, the engine's loader takes the
        buckets of this round, and ``engine.reason`` says why.

        Raises:
            TransferError: when another bucket is due. Also when the plan has slices of HF tensors and the map cannot be
                used; then nothing was copied.
        """
        bucket, slot = self._due(number)
        if number == 0:
            engine.begin(self.plan)
        elif engine is not self._engine:
            raise TransferError("this engine did not get the previous buckets; begin a round with bucket 0")
        self._engine = engine
        if number not in self._views:
            self._views[number] = _pairs(bucket, slot)
        engine.write(self._views[number], stay=True)
        self._read(number, slot)

    def _due(self, number: int) -> tuple[Bucket, Tensor]:
        if not self._slots:
            raise TransferError("expected a receiver that is open, found one that was closed: make another")
        if number != self._next or not 0 <= number < len(self.plan.buckets):
            due = self._next if self._next < len(self.plan.buckets) else "finish()"
            raise TransferError(
                f"expected bucket {due} of {len(self.plan.buckets)}, found bucket {number}; send all in their order, "
                "and call restart() after a round that broke off"
            )
        bucket = self.plan.buckets[number]
        return bucket, self._slots[bucket.slot]

    def _read(self, number: int, slot: Tensor) -> None:
        if slot.is_cuda:
            torch.cuda.current_stream(slot.device).synchronize()
        self._next = number + 1

    def finish(self, version: int | None = None) -> None:
        """End a round; the engine of ``copy_into`` then has the weights of ``version``.

        Args:
            version: a number for these weights; None counts rounds.

        Raises:
            TransferError: when tensors of the plan have not arrived.
        """
        missing = [piece.name for bucket in self.plan.buckets[self._next :] for piece in bucket.pieces]
        if missing:
            raise TransferError(f"{plural(len(missing), 'tensor')} never came, from {missing[0]} to {missing[-1]}")
        self._next = 0
        if self._engine is not None:
            self._engine.complete(version)
            self._engine = None

    def restart(self) -> None:
        """Expect the first bucket again, after a round that broke off."""
        if self._engine is not None:
            self._engine.break_off()
        self._next, self._engine = 0, None

    def close(self) -> None:
        """Close the slots. No views of the slots may be left. The sender frees the memory afterwards."""
        self._slots.clear()
        self._views.clear()


def _pairs(bucket: Bucket, slot: Tensor) -> list[Pair]:
    return [(piece.name, piece.view(slot)) for piece in bucket.pieces]


def _check(plan: BucketPlan) -> None:
    """Check that every tensor lies within a slot, does not overlap other tensors, and has a unique name."""
    names: set[str] = set()
    for place, bucket in enumerate(plan.buckets):
        if bucket.number != place or bucket.slot != place % plan.num_slots:
            raise TransferError(
                f"expected bucket {place} in slot {place % plan.num_slots}, found number {bucket.number}, slot "
                f"{bucket.slot}; make the plan with plan_buckets"
            )
        end = 0
        for piece in bucket.pieces:
            if piece.name in names:
                raise TransferError(f"{piece.name} is in the plan twice; expected each tensor once")
            names.add(piece.name)
            if piece.offset < end or piece.offset % ALIGNMENT or piece.offset + piece.num_bytes > plan.slot_bytes:
                raise TransferError(
                    f"{piece.name} takes {piece.num_bytes} bytes from byte {piece.offset} on; expected a multiple of "
                    f"{ALIGNMENT}, from byte {end} on, and an end within the slot of {plan.slot_bytes} bytes"
                )
            end = piece.offset + piece.num_bytes
