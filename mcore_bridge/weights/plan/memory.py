"""Memory that the run of a plan takes beside the model, computed from the plan."""

from __future__ import annotations

from collections.abc import Sequence

from mcore_bridge.weights.plan.budget import MESSAGES_IN_FLIGHT
from mcore_bridge.weights.plan.export_plan import ExportPlan


def peak_bytes(plan: ExportPlan) -> int:
    """The most bytes that messages and outputs take on the receiver."""
    if len(plan.streams) == 1:
        return plan.open_bytes
    rooms = [message.room for message in plan.messages]
    return max(held + _message_bytes(rooms, number) for number, held in enumerate(plan.open_bytes_by_message))


def _message_bytes(rooms: Sequence[int], number: int) -> int:
    """Bytes of memory for messages while message ``number`` is unpacked.

    This message and the next have memory. If the messages after them have another size, memory for all messages in
    flight is allocated at once, while the messages that are not unpacked still have theirs.
    """
    if number + 1 == len(rooms):
        return sum(rooms[-MESSAGES_IN_FLIGHT:])
    now, following, *_ = rooms[number : number + MESSAGES_IN_FLIGHT]
    if now != following:
        return now + MESSAGES_IN_FLIGHT * following
    further = rooms[min(number + MESSAGES_IN_FLIGHT, len(rooms) - 1)]
    return following + max(now, MESSAGES_IN_FLIGHT * further if further != following else 0)
