"""An export in rounds that all ranks go through together: for trainers that hand weights on in so many steps."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from itertools import chain, islice, pairwise

from torch import Tensor

from mcore_bridge.weights.agreement import Export
from mcore_bridge.weights.transfer.executor import run_messages


def run_rounds(export: Export, num_rounds: int) -> Generator[dict[str, Tensor], None, None]:
    """Export in ``num_rounds`` rounds, with the same messages in each of them on every rank: what is complete after it.

    A rank may get nothing with a round. Between rounds nobody waits for anybody, and the next two messages are on their
    way; who closes the generator goes on sending what the others still need. Tensors are the caller's own.

    Args:
        num_rounds: the same on every rank. With fewer messages than that, some rounds are empty.

    Raises:
        ExportError: on every rank of the group, when any of them fails.
    """
    count = len(export.program.plan.messages)
    ends = [count * number // num_rounds for number in range(num_rounds)]
    with closing(run_messages(export.program, export.group, export.bound.tensors)) as messages:
        for start, end in pairwise(ends):
            yield dict(chain.from_iterable(islice(messages, end - start)))
        yield dict(chain.from_iterable(messages))  # to their end, where the failures of others show
