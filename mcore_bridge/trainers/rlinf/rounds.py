"""Exports in rounds, in which all ranks take part, for trainers that transfer weights in a given number of steps."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from itertools import chain, islice, pairwise

from torch import Tensor

from mcore_bridge.weights.agreement import Export
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
    bound = export.bound
    with closing(run_messages(export.program, export.group, bound.tensors, merges=bound.merges)) as messages:
        for start, end in pairwise(ends):
            yield dict(chain.from_iterable(islice(messages, end - start)))
        yield dict(chain.from_iterable(messages))  # run to the end, because failures of other ranks are reported there
