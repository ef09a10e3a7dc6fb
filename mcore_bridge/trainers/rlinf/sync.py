"""Exports in a given number of rounds, for RLinf, which gathers a model in buckets.

A bucket is one round of one export. Its messages follow from the plan, and are equal on every rank. All ranks run the
rounds together.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain, islice, pairwise

from torch import Tensor

from mcore_bridge.errors import ExportError
from mcore_bridge.trainers.rlinf.engine import Destination
from mcore_bridge.weights.agreement import Export, open_export
from mcore_bridge.weights.model_chunks import Models
from mcore_bridge.weights.plan.export_plan import MESSAGES_IN_FLIGHT
from mcore_bridge.weights.plan.target import Target
from mcore_bridge.weights.provenance import HF
from mcore_bridge.weights.transfer.executor import run_messages


def run_rounds(export: Export, num_rounds: int) -> Generator[dict[str, Tensor], None, None]:
    """Export in ``num_rounds`` rounds, and after each yield the tensors that it completes.

    A round has equal messages on all ranks. A rank may get nothing in a round. Between rounds no rank waits for
    another, and the next two messages travel. A rank that closes the generator goes on sending what other ranks still
    need. Tensors belong to the caller.

    Args:
        num_rounds: the number of rounds, equal on every rank. If there are fewer messages, some rounds are empty.

    Raises:
        ExportError: on every rank of the group, when any of them fails.
    """
    count = len(export.program.plan.messages)
    ends = [count * number // num_rounds for number in range(num_rounds)]
    with closing(run_messages(export.program, export.group, export.held)) as messages:
        for start, end in pairwise(ends):
            yield dict(chain.from_iterable(islice(messages, end - start)))
        yield dict(chain.from_iterable(messages))  # run to the end, because failures of other ranks are reported there


@dataclass(eq=False)
class Sync:
    """One pass over ``models`` in ``num_buckets`` rounds, with messages of ``bucket_bytes``."""

    models: Models
    num_buckets: int
    bucket_bytes: int
    hf: HF | None
    head: str
    merged: bool | None
    num_done: int = 0
    destination: Destination | None = None
    export: Export | None = None
    rounds: Generator[dict[str, Tensor], None, None] | None = None

    def gather(
        self,
        number: int,
        destination: Destination | None,
        target_at: Callable[[Models, Destination], Target],
    ) -> dict[str, Tensor]:
        """Gather the next bucket.

        Args:
            number: the number of the bucket.
            destination: the destination of this rank's weights; None gathers whole tensors.
            target_at: a function that returns the target for a destination.

        Raises:
            ExportError: it is not the next bucket, its destination differs from the first bucket's, or any rank failed.
        """
        if number != self.num_done:
            raise ExportError(f"expected bucket {self.num_done}, found {number}; gather each bucket once, in order")
        if self.rounds is None:
            self.rounds = self._begun(destination, target_at)
        if destination != self.destination:
            raise ExportError(
                f"expected the destination of the first bucket, {self.destination}, found {destination}; for several "
                "destinations use gather_full_model, and narrow_to_target for each"
            )
        self.num_done += 1
        return next(self.rounds)

    def close(self) -> None:
        """Stop gathering, and send what other ranks still need."""
        if self.rounds is not None:
            self.rounds.close()

    def _begun(
        self, destination: Destination | None, target_at: Callable[[Models, Destination], Target]
    ) -> Generator[dict[str, Tensor], None, None]:
        target: Target | Exception = "everything"
        try:
            if destination is not None:
                target = target_at(self.models, destination)
        except Exception as error:  # other ranks are about to wait for this rank
            target = error
        self.destination = destination
        self.export = open_export(
            *(self.models, self.hf, self.head),
            expert_format="split",
            bucket_bytes=MESSAGES_IN_FLIGHT * self.bucket_bytes,
            target=target,
            merged=self.merged,
        )
        return run_rounds(self.export, self.num_buckets)


@dataclass(frozen=True, slots=True)
class ReshardBucket:
    """A round of a sync, by its number. It has no content before it is gathered."""

    sync: Sync = field(repr=False)
    number: int


@dataclass(frozen=True, slots=True)
class FullBucket:
    """Whole HF tensors, which ``narrow_to_target`` cuts for any number of destinations."""

    export: Export = field(repr=False)
    tensors: Mapping[str, Tensor]
