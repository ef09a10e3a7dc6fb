"""What an export costs a rank, from its plan: bytes, messages, seconds, and the memory that
``weights/transfer/executor.py`` takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import mul

from mcore_bridge.weights.plan.export_plan import ExportPlan
from mcore_bridge.weights.plan.memory import peak_bytes

BANDWIDTH = 255.0
"""GB/s of the windows of others that a rank receives: measured, of exports of 16 and 61 GB among 4 H200s by NVLink."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one export, on the rank that has most of it.

    Attributes:
        num_ranks: that export together.
        num_messages: collectives, or pairs of them where they go by stages (``transfer/window_order.py``); beside them
            there are three small all-reduces: to find the plan that all have, to say that all can begin, and that all
            have come to the end; and one wherever the size of messages changes.
        sent: bytes of a rank's own windows. Those that ranks send at once are as wide as the fullest of them.
        weights: bytes of weights in ``sent``, on the rank with most of them.
        received: bytes of the windows of the others.
        memory: bytes beside the model, while a consumer holds no tensors of earlier messages.
        seconds: that receiving takes at a bandwidth, and nothing else.
    """

    num_ranks: int
    num_messages: int
    sent: int
    weights: int
    received: int
    memory: int
    seconds: float


def cost_of(plan: ExportPlan, *, bandwidth: float = BANDWIDTH) -> Cost:
    """Count.

    Args:
        plan: of an export.
        bandwidth: that a rank receives with, in GB/s.
    """
    num_ranks = len(plan.streams)
    totals = [sum(map(mul, widths, plan.widths.values())) for widths in zip(*plan.widths, strict=True)]
    sent = max(totals) if num_ranks > 1 else 0
    row_bytes = [entry.row_bytes for entry in plan.payload.entries]
    weights = max(sum(run.rows * run.times * row_bytes[run.entry] for run in stream) for stream in plan.streams)
    received = sum(totals) - min(totals)
    return Cost(
        num_ranks=num_ranks,
        num_messages=len(plan.messages) if num_ranks > 1 else 0,
        sent=sent,
        weights=weights if num_ranks > 1 else 0,
        received=received,
        memory=peak_bytes(plan),
        seconds=received / bandwidth / 1e9,
    )
