"""The cost of an export for a rank, computed from its plan: bytes, messages, seconds, and memory."""

from __future__ import annotations

from dataclasses import dataclass
from operator import mul

from mcore_bridge.commands.options import BANDWIDTH
from mcore_bridge.weights.plan.export_plan import ExportPlan
from mcore_bridge.weights.plan.memory import peak_bytes


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one export, on the rank with the highest cost.

    Attributes:
        ranks: the number of ranks that export together.
        messages: the number of collectives, or of pairs if they go by stages (``transfer/window_order.py``). Small
            all-reduces are not counted: three per export, and one for each change of the size of messages.
        sent: bytes of a rank's own windows. Windows of one message are all as wide as the fullest.
        weights: bytes of weights in ``sent``, on the rank with most of them.
        received: bytes of the windows of other ranks.
        memory: bytes beside the model, if the consumer keeps no tensors of earlier messages.
        seconds: the time to receive the bytes at a given bandwidth, and nothing else.
    """

    ranks: int
    messages: int
    sent: int
    weights: int
    received: int
    memory: int
    seconds: float


def cost_of(plan: ExportPlan, *, bandwidth: float = BANDWIDTH) -> Cost:
    """Computes the cost of an export.

    Args:
        plan: of the export.
        bandwidth: GB/s that a rank receives.
    """
    num_ranks = len(plan.streams)
    totals = [sum(map(mul, widths, plan.widths.values())) for widths in zip(*plan.widths, strict=True)]
    sent = max(totals) if num_ranks > 1 else 0
    row_bytes = [entry.row_bytes for entry in plan.payload.entries]
    weights = max(sum(run.rows * run.times * row_bytes[run.entry] for run in stream) for stream in plan.streams)
    received = sum(totals) - min(totals)
    return Cost(
        ranks=num_ranks,
        messages=len(plan.messages) if num_ranks > 1 else 0,
        sent=sent,
        weights=weights if num_ranks > 1 else 0,
        received=received,
        memory=peak_bytes(plan),
        seconds=received / bandwidth / 1e9,
    )
