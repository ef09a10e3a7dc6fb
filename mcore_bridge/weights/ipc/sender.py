"""The sender's side: a ring of flat buffers, allocated once, filled in order, and read by another process in place.

The caller provides the channel between the two processes. It carries the plan and the handles once, then the number of
each filled bucket, and an answer when the bucket was read.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from mcore_bridge.arguments import DEVICE, require
from mcore_bridge.errors import TransferError, shown
from mcore_bridge.rules.spec import Pair
from mcore_bridge.weights.ipc.buckets import Bucket, BucketPlan
from mcore_bridge.weights.ipc.shared_memory import Handle, allocate, share
from mcore_bridge.weights.transfer.copier import WORDS, indexed

AT_ONCE = 64 << 20
"""Bytes of tensors that are copied into a slot by one call."""


class BufferRing:
    """The slots of a plan, in memory that another process can open. They serve any number of rounds.

    Args:
        plan: the result of ``plan_buckets`` for the manifest.
        device: a CUDA device, or the CPU. None means the current CUDA device if there is one.

    Example:
        >>> ring = engines.BufferRing(engines.plan_buckets(mb.manifest(models)), device="cpu")
        >>> for bucket in ring.fill(mb.iter_hf_weights(models), acknowledged=lambda: "read"):
        ...     print(bucket.number)                      # send it; acknowledged waits for the answer
        0
        >>> ring.close()
    """

    def __init__(self, plan: BucketPlan, device: torch.device | str | None = None) -> None:
        if not isinstance(plan, BucketPlan):
            raise TransferError(f"expected a plan, found a {type(plan).__name__}: pass plan_buckets(manifest(models))")
        require(TransferError, device=(device, DEVICE.or_none()))
        self.plan = plan
        self.device = indexed(torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")))
        self._slots = [allocate(plan.slot_bytes, self.device) for _ in range(plan.num_slots)]
        self._unread: deque[int] = deque()
        self._views: dict[int, list[Tensor]] = {}

    def handles(self) -> tuple[Handle, ...]:
        """A handle for each slot, for one consumer. Call this once for each consumer, which opens each handle once."""
        digest = self.plan.digest()
        return tuple(share(slot, digest) for slot in self._slots)

    def slot(self, bucket: Bucket) -> Tensor:
        """The memory of ``bucket``, uint8 [slot_bytes], for channels of other projects."""
        return self._slots[bucket.slot]

    def fill(
        self, pairs: Iterable[Pair], *, acknowledged: Callable[[], object], in_flight: int | None = None
    ) -> Generator[Bucket, None, None]:
        """Yield each bucket of the plan when it is complete in its slot, so that another process can read it.

        When the iterator is exhausted, every bucket has been read. ``pairs`` is always closed, so that no rank of an
        export waits in vain.

        Args:
            pairs: the tensors of the plan in its order, on any device: ``iter_hf_weights`` with the arguments of the
                manifest. A tensor must not change until its bucket is yielded: some tensors are copied later, together.
            acknowledged: waits until all consumers have read the oldest bucket that is not yet acknowledged. It must
                raise if no answer will come. It is called when no slot is free, and at the end.
            in_flight: the most buckets that may be unread when the next bucket is yielded, by default the number of
                slots. Pass 1 for a channel on which questions and answers alternate. The next slot is filled while the
                consumer reads.

        Yields:
            Each bucket in the order of the plan, when all of its tensors are in its slot.

        Raises:
            TransferError: when a tensor is not the next one of the plan, or the last round broke off.
        """
        allowed = self.plan.num_slots if in_flight is None else in_flight
        with _closing(pairs) as tensors:
            self._check(allowed)
            for bucket in self.plan.buckets:
                self._wait(acknowledged, self.plan.num_slots - 1)
                self._write(bucket, tensors)
                self._wait(acknowledged, allowed - 1)
                self._unread.append(bucket.number)
                yield bucket
            for name, _ in tensors:
                raise TransferError(f"the plan ends before {name}; make it from the manifest of these tensors")
        self._wait(acknowledged, 0)

    def _places(self, bucket: Bucket) -> list[Tensor]:
        """The targets of a bucket's tensors in the slot, with integer dtypes, so that copies keep every bit."""
        if bucket.number not in self._views:
            slot = self._slots[bucket.slot]
            self._views[bucket.number] = [piece.view(slot).view(WORDS[piece.dtype.itemsize]) for piece in bucket.pieces]
        return self._views[bucket.number]

    def restart(self) -> None:
        """Count all slots as read, after a round that broke off. No consumer may still read any of them."""
        self._unread.clear()

    def close(self) -> None:
        """Free the memory, after the consumers have closed it. On a GPU, torch keeps it for its next allocations."""
        self._slots.clear()
        self._views.clear()
        if self.device.type == "cuda":
            torch.cuda.ipc_collect()

    def _check(self, allowed: int) -> None:
        if allowed < 1:
            raise TransferError(f"expected in_flight=1 or more, found {allowed}")
        if self._unread or not self._slots:
            state = f"buckets {list(self._unread)} were never acknowledged" if self._slots else "its memory was freed"
            raise TransferError(
                f"the ring cannot be filled: {state}; call restart() when no process reads it, or make another"
            )

    def _wait(self, acknowledged: Callable[[], object], allowed: int) -> None:
        while len(self._unread) > allowed:
            acknowledged()
            self._unread.popleft()

    def _write(self, bucket: Bucket, tensors: Iterator[Pair]) -> None:
        near, far, waiting = [], [], 0
        for piece, place in zip(bucket.pieces, self._places(bucket), strict=True):
            pair = next(tensors, (None, None))
            if not (isinstance(pair, tuple | list) and len(pair) == 2):
                raise TransferError(f"pairs must have a name and a tensor each, found {shown(pair)}: pass items()")
            name, tensor = pair
            actual = None if tensor is None else (name, tensor.dtype, tuple(tensor.shape))
            expected = (piece.name, piece.dtype, piece.shape)
            if tensor is None or actual != expected or tensor.is_meta:
                shown_pair = "no further tensor" if tensor is None else f"({name!r}, {shown(tensor)})"
                raise TransferError(
                    f"expected {expected}, found {shown_pair}; make the plan from the manifest of these tensors"
                )
            near.append(tensor.detach().view(place.dtype))
            far.append(place)
            waiting += piece.num_bytes
            if waiting >= AT_ONCE or piece is bucket.pieces[-1]:
                torch._foreach_copy_(far, near, non_blocking=True)
                near, far, waiting = [], [], 0
        if self.device.type == "cuda":  # streams of the consumer do not wait for ours
            torch.cuda.current_stream(self.device).synchronize()


@contextmanager
def _closing(pairs: Iterable[Pair]) -> Iterator[Iterator[Pair]]:
    iterator = iter(pairs)
    try:
        yield iterator
    finally:
        if isinstance(iterator, Generator):
            # close does nothing for a generator that has not begun
            if inspect.getgeneratorstate(iterator) == inspect.GEN_CREATED:
                with suppress(Exception):  # the first error is raised
                    next(iterator, None)
            iterator.close()
