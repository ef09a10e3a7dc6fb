"""The cost of an export, or of sending to rollout engines, from the plans: bytes, messages, seconds, memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

from mcore_bridge.commands import text
from mcore_bridge.commands.options import BANDWIDTH
from mcore_bridge.commands.plan.mesh_plan import MeshPlan
from mcore_bridge.commands.plan.replicas import members
from mcore_bridge.errors import TargetError
from mcore_bridge.weights.plan.all_to_all import plan_targets
from mcore_bridge.weights.plan.export_plan import MESSAGES_IN_FLIGHT, ExportPlan, peak_bytes
from mcore_bridge.weights.plan.target import EngineRank
from mcore_bridge.weights.transfer.program import Program


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one export, on the rank with the highest cost.

    Attributes:
        ranks: the number of ranks that export together.
        messages: the number of collectives, or of pairs if they go by stages (``weights/transfer/collectives.py``).
            Small all-reduces are not counted: three per export, and one for each change of the size of messages.
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
        plan: the plan of the export.
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


@dataclass(frozen=True, slots=True)
class Feeding:
    """The cost of feeding engines from the first model replica of a trainer.

    Attributes:
        messages: the number of all-to-alls.
        received: bytes of weights, on the rank that receives most from others.
        sent: bytes of weights, on the rank that sends most.
        total: bytes of weights that travel between all ranks.
        memory: bytes beside the model and the yielded tensors, on the rank that receives most.
        seconds: the time to receive or send the bytes at a given bandwidth, and nothing else.
    """

    messages: int
    received: int
    sent: int
    total: int
    memory: int
    seconds: float


def feed(mesh_plan: MeshPlan, engine: Sequence[EngineRank], *, bandwidth: float = BANDWIDTH) -> Feeding:
    """Computes the cost. Rank ``r`` of the job feeds rank ``r % len(engine)`` of an engine.

    Args:
        mesh_plan: the plan of the trainer's mesh.
        engine: all ranks of one engine.
        bandwidth: GB/s that a rank receives, and that it sends.

    Raises:
        TargetError: engines of this size do not fill the job, or the model cannot be sliced so.
    """
    size, world_size = len(engine), mesh_plan.world_size
    if world_size % size:
        raise TargetError(
            f"engines of {text.plural(size, 'rank')} do not fill a job of {world_size} ranks: choose sizes whose "
            "product divides it, or another --world"
        )
    targets = [engine[rank % size] for rank in members(mesh_plan.blueprint.dims, world_size)]
    plans = plan_targets(*mesh_plan.replica, targets, bucket_bytes=None)
    ranks = range(len(targets))
    received = [sum(map(receiver.bytes_from, ranks)) for receiver in plans.receivers]
    sent = [sum(receiver.bytes_from(rank) for receiver in plans.receivers) for rank in ranks]
    most = max(ranks, key=received.__getitem__)
    program = Program(plans.plans_of(most), most)
    num_messages = len(program.plan.messages)
    memory = program.plan.open_bytes + min(MESSAGES_IN_FLIGHT, num_messages) * sum(program.room(0))
    seconds = max(*received, *sent) / bandwidth / 1e9
    return Feeding(num_messages, max(received), max(sent), sum(received), memory, seconds)
