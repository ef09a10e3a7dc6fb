"""Plans of what travels where not all get everything: a lane from each rank to each, and when it is busy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from operator import sub

from mcore_bridge.rules.layout import Axes
from mcore_bridge.rules.mapping import WeightMapping
from mcore_bridge.weights.plan.alignment import ALIGNMENT, aligned
from mcore_bridge.weights.plan.budget import MEMORY, MESSAGES_IN_FLIGHT
from mcore_bridge.weights.plan.engine_slices import wanted_by
from mcore_bridge.weights.plan.export_plan import ExportPlan, Message
from mcore_bridge.weights.plan.gather import Request, SourceShard, assemble_plan, assign_senders, shards_of
from mcore_bridge.weights.plan.inventory import Inventory, merge_inventories
from mcore_bridge.weights.plan.schedule import MIN_WINDOW
from mcore_bridge.weights.plan.stream import HEADER, SendRange, Streams, WindowRun, cut, num_messages, widths
from mcore_bridge.weights.plan.target import Target

TO_TARGETS = 1 << 30
"""Bytes of all messages that are on their way, received and sent, at most, where nothing else is asked for."""
GAP = 2
"""Messages of a lane from that before a large tensor to that with which it begins: other lanes may be one behind."""
RARE = 32
"""Messages of a lane for each such gap at least: it travels empty."""
SHARED = 1 << 20
"""Bytes from which on those that hold a shard share the sending of it to a target."""


def plan_targets(
    mapping: WeightMapping,
    axes: Axes,
    num_layers: int,
    inventories: Sequence[Inventory],
    targets: Sequence[Target],
    *,
    bucket_bytes: int | None,
) -> TargetPlans:
    """Plan the export of what each rank asks for. Only what is needed travels.

    Args:
        targets: by rank of the group.
        bucket_bytes: of the messages that are on their way to and from a rank, with what it takes of itself meanwhile.
            None leaves room for the largest tensor within ``MEMORY``, and for what else is in the making.

    Raises:
        MappingError: what ``merge_inventories`` raises.
        TargetError: when the model cannot be cut as a target says.
    """
    entries = merge_inventories(mapping, axes, num_layers, inventories)
    found = {
        target: Request.of(wanted_by(target, mapping, axes, num_layers, entries), bucket_bytes)
        for target in dict.fromkeys(targets)
    }
    loads, shards = [0] * len(targets), {target: shards_of(wanted, SHARED) for target, wanted in found.items()}
    lanes = tuple(ReceiverPlan(found[each], shards[each], loads, receiver) for receiver, each in enumerate(targets))
    most = max(lane.taken + sum(each.bytes_of(rank) for each in lanes) for rank, lane in enumerate(lanes))
    largest = max((output.num_bytes for wanted in found.values() for output in wanted.payload.outputs), default=0)
    room = 2 * bucket_bytes + largest if bucket_bytes else MEMORY // 2  # for outputs, beside messages
    beside = max(MEMORY, largest * 5 // 4) - largest  # for messages, and for what is in the making with the largest
    bucket_bytes = bucket_bytes or min(max((MEMORY - largest * 3 // 2) // 2, beside // 3), TO_TARGETS)
    count = max(-(-most // max(bucket_bytes // MESSAGES_IN_FLIGHT, MIN_WINDOW * len(targets))), 1)
    stages = [inventory.ranks["pp"] for inventory in inventories]
    of_each = dict(zip(reversed(targets), reversed(lanes), strict=True))  # the first of those who ask for the same
    together = all(lane.in_the_making() <= room for lane in of_each.values())
    return TargetPlans(lanes, SendSchedule(count, [0] * len(stages) if together else stages, targets))


@dataclass(frozen=True, slots=True)
class TargetPlans:
    """What travels to all ranks: the lanes to each, and when they are busy."""

    lanes: tuple[ReceiverPlan, ...]
    pace: SendSchedule

    def plans_of(self, rank: int) -> tuple[ExportPlan, ...]:
        """For each rank what travels to it, as ``rank`` has to know it: to itself from everybody, to others from it."""
        return tuple(
            lane.arriving(self.pace) if receiver == rank else lane.sent_by(rank, self.pace)
            for receiver, lane in enumerate(self.lanes)
        )


class SendSchedule:
    """When each rank sends to each receiver: always; or stage by stage, so that less is in the making there.

    Receivers begin with different stages, those who ask for the same among them too. So all stages send all the time.
    """

    def __init__(self, count: int, stages: Sequence[int], targets: Sequence[Target]) -> None:
        places = {stage: place for place, stage in enumerate(sorted(set(stages)))}
        self._places = [places[stage] for stage in stages]
        self.num_turns = len(places)
        numbers = {target: number for number, target in enumerate(dict.fromkeys(targets))}
        alike = sorted(range(len(targets)), key=lambda receiver: numbers[targets[receiver]])
        self._begins = {receiver: number for number, receiver in enumerate(alike)}
        self.times = -(-count // self.num_turns)
        """Messages of a turn."""

    def first(self, sender: int, receiver: int) -> int:
        """The number of the first message with which a rank sends to a receiver."""
        return (self._places[sender] + self._begins[receiver]) % self.num_turns * self.times

    def widths(
        self, own: Mapping[int, tuple[int, int]], firsts: Mapping[int, int], idle: Sequence[int]
    ) -> list[tuple[int, ...]]:
        """Bytes of the windows of all ranks with each message.

        Args:
            own: of ranks that send, with any message of their turn but the last, and with the last.
            firsts: the first message of their turn.
            idle: of each rank, with all other messages.
        """
        needed = []
        for turn in range(self.num_turns):
            middle, last = list(idle), list(idle)
            for rank, each in own.items():
                if firsts[rank] == turn * self.times:
                    middle[rank], last[rank] = each
            needed += [*[tuple(middle)] * (self.times - 1), tuple(last)]
        return needed


class ReceiverPlan:
    """What travels to one receiver: a lane from each rank. What it has itself, it takes at the same pace.

    Args:
        shards: of what is wanted.
        loads: bytes that each rank has to send; counted on.
    """

    def __init__(self, wanted: Request, shards: Sequence[SourceShard], loads: list[int], receiver: int) -> None:
        self._wanted, self._row_bytes, self._receiver = wanted, wanted.row_bytes, receiver
        before = list(loads)
        self._parts = assign_senders(shards, loads, receiver)
        self._bytes = list(map(sub, loads, before))
        self._bytes[receiver] = sum(aligned(part.rows * self._row_bytes[part.entry]) for part in self._parts[receiver])
        self.taken = sum(self._bytes)
        """Bytes that become outputs: those that travel here, and its own."""

    def bytes_of(self, sender: int) -> int:
        """Bytes that travel from a rank."""
        return 0 if sender == self._receiver else self._bytes[sender]

    def in_the_making(self) -> int:
        """Bytes of outputs that are there at once where all lanes are busy.

        Of each lane the most that is given out together, of what comes by it alone and of what comes by others too.
        """
        keys, sizes = self._wanted.keys, self._wanted.sizes
        lanes = [dict.fromkeys(keys[part.entry] for part in each) for each in self._parts]
        times = Counter(chain.from_iterable(lanes))
        own = [max((sizes[key] for key in lane if times[key] == 1), default=0) for lane in lanes]
        shared = {max((key for key in lane if times[key] > 1), key=sizes.__getitem__, default=None) for lane in lanes}
        return sum(own) + sum(sizes[key] for key in shared if key is not None)

    def arriving(self, pace: SendSchedule) -> ExportPlan:
        """All lanes."""
        ranks = range(len(self._parts))
        streams = tuple(self._cut(sender, pace) for sender in ranks)
        needed = self._needed(ranks, streams, pace)
        return assemble_plan(self._wanted, streams, needed, _rooms(needed))

    def sent_by(self, sender: int, pace: SendSchedule) -> ExportPlan:
        """One lane, with whose messages nothing is given out."""
        streams = tuple(self._cut(sender, pace) if rank == sender else () for rank in range(len(self._parts)))
        needed = self._needed([sender], streams, pace)
        messages = zip(range(len(needed)), needed, _rooms(needed), strict=True)
        return ExportPlan(self._wanted.payload, streams, tuple(Message(*each, (), streams) for each in messages))

    def _cut(self, sender: int, pace: SendSchedule) -> tuple[WindowRun, ...]:
        """A window has room for its share, for a row that does not fit any more, and for what alignment takes."""
        begins = first = pace.first(sender, self._receiver)
        parts: Sequence[SendRange] = self._parts[sender]
        if pace.num_turns > 1:
            parts = _large_last(parts, self._wanted.large)
        longest = max((self._row_bytes[part.entry] for part in parts), default=0)
        stretches = _before_large(parts, self._wanted.large, pace.times // RARE)
        times = pace.times - GAP * (len(stretches) - 1)
        window = HEADER + aligned(-(-self._bytes[sender] // times)) + longest + ALIGNMENT
        stream: tuple[WindowRun, ...] = ()
        for stretch in stretches:
            stream += cut([stretch], self._row_bytes, [window], first=begins)[0]
            begins = stream[-1].last() + GAP if stream else begins
        assert num_messages((stream,)) <= first + pace.times
        return stream

    def _needed(self, senders: Sequence[int], streams: Streams, pace: SendSchedule) -> list[tuple[int, ...]]:
        """Bytes of all windows with each message: of ranks that send, but for the receiver, a header at least."""
        travelling = [sender for sender in senders if sender != self._receiver]
        firsts = {sender: pace.first(sender, self._receiver) for sender in travelling}
        own = {rank: widths(streams[rank], self._row_bytes, first + pace.times) for rank, first in firsts.items()}
        return pace.widths(own, firsts, [HEADER if rank in own else 0 for rank in range(len(streams))])


def _large_last(parts: Sequence[SendRange], large: Collection[int]) -> Sequence[SendRange]:
    """An embedding behind the layers: a consumer may hold the output layer of another stage while this one begins."""
    ends_large = bool(parts) and parts[-1].entry in large
    return parts if ends_large else sorted(parts, key=lambda part: part.entry in large)


def _before_large(parts: Sequence[SendRange], large: Collection[int], most: int) -> list[Sequence[SendRange]]:
    """Parts, apart where a large one follows others, which are complete then; together if that is so more often."""
    are_large = [part.entry in large for part in parts]
    borders = [number for number, pair in enumerate(pairwise(are_large), 1) if pair == (False, True)]
    if len(borders) > most:
        borders = []
    return [parts[start:end] for start, end in pairwise([0, *borders, len(parts)])]


def _rooms(needed: Sequence[tuple[int, ...]]) -> list[int]:
    """All messages are of one size. Few widths differ, and most are the same object."""
    return [max(map(sum, {id(each): each for each in needed}.values()))] * len(needed)
