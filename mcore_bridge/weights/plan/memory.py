"""The memory that running a plan takes beside the model, counted from the plan."""

from __future__ import annotations

from collections.abc import Sequence

from mcore_bridge.weights.plan.budget import AHEAD
from mcore_bridge.weights.plan.export_plan import ExportPlan


def footprint(plan: ExportPlan) -> int:
    """Bytes on the receiver: memory for messages, and outputs."""
    if len(plan.streams) == 1:
        return plan.open_bytes
    rooms = [message.room for message in plan.messages]
    return max(held + _for_messages(rooms, number) for number, held in enumerate(plan.opened))


def _for_messages(rooms: Sequence[int], number: int) -> int:
    """Bytes of memory for messages while one is unpacked: of itself, of the next, and what is made for further ones.

    Where their size changes, there is as much as for all that will be on their way, beside what has not arrived yet.
    """
    if number + 1 == len(rooms):
        return sum(rooms[-AHEAD:])
    now, following, *_ = rooms[number : number + AHEAD]
    if now != following:
        return now + AHEAD * following
    further = rooms[min(number + AHEAD, len(rooms) - 1)]
    return following + max(now, AHEAD * further if further != following else 0)
