"""Plans of an export in which ranks get different tensors: one stream from each sender to each receiver.

Guests with equal targets get one stream together, and pass it on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from operator import sub

from mcore_bridge.rules.mapping import ModelAxes, WeightMapping
from mcore_bridge.rules.spec import ALIGNMENT, aligned
from mcore_bridge.weights.plan.export_plan import (
    LAG,
    MEMORY,
    MESSAGES_IN_FLIGHT,
    ExportPlan,
    Message,
    RelayedMessage,
    RelayedPlan,
)
from mcore_bridge.weights.plan.gather import Request, SourceShard, assemble_plan, assign_senders, shards_of
from mcore_bridge.weights.plan.inventory import Encode, Inventory, ParamEntry, merge_inventories
from mcore_bridge.weights.plan.payload import Payload
from mcore_bridge.weights.plan.schedule import MIN_WINDOW
from mcore_bridge.weights.plan.select_for_target import dealt, select_for
from mcore_bridge.weights.plan.stream import HEADER, SendRange, Streams, WindowRun, cut, num_messages, widths
from mcore_bridge.weights.plan.target import Target

TO_TARGETS = 1 << 30
"""Upper limit on the bytes of all messages in flight, received and sent, unless the caller asks for more."""
GAP = 2
"""Messages between a large tensor and the tensor before it. Other senders may be one message behind."""
RARE = 32
"""A stream has at most one gap for this many messages, because a gap travels empty."""
SHARED = 1 << 20
"""All holders of a shard send parts of it to a target if the shard has at least this many bytes."""
PER_HOP = 16
"""Messages for each sibling that passes weights on, since the next one has them ``LAG`` messages later."""


def plan_targets(
    mapping: WeightMapping,
    axes: ModelAxes,
    num_layers: int,
    inventories: Sequence[Inventory],
    targets: Sequence[Target],
    *,
    bucket_bytes: int | None,
    encode: Encode = tuple,
    guests: int = 0,
) -> TargetPlans:
    """Plan an export to the targets of all ranks. Only needed bytes travel.

    Args:
        targets: the target of each rank of the group.
        bucket_bytes: limits the messages in flight to and from a rank, with the bytes that it copies from itself at
            that time. None leaves room in ``MEMORY`` for the largest tensor and all other incomplete tensors.
        encode: replaces the entries of weights that leave encoded.
        guests: how many ranks at the end of the group are guests. Guests with equal targets are siblings: each gets
            everything from the guest before it. No link carries more bytes than without this, since a worker never
            sends more than it gets.

    Raises:
        MappingError: what ``merge_inventories`` raises.
        TargetError: when the model cannot be cut for a target.
    """
    entries = encode(merge_inventories(mapping, axes, num_layers, inventories))
    kinds = [(rank, target) if target == "share" else target for rank, target in enumerate(targets)]
    wanted: dict[object, Sequence[ParamEntry]] = {
        target: select_for(target, mapping, axes, num_layers, entries)
        for target in dict.fromkeys(targets)
        if target != "share"
    }
    shares = dealt(entries, [rank for rank, target in enumerate(targets) if target == "share"])
    wanted |= {(rank, "share"): share for rank, share in shares.items()}
    requests = {kind: Request.of(of_kind, bucket_bytes) for kind, of_kind in wanted.items()}
    loads, shards = [0] * len(targets), {kind: shards_of(request, SHARED) for kind, request in requests.items()}
    receivers: list[Feed] = []
    last_guest: dict[object, int] = {}
    for receiver, kind in enumerate(kinds):
        if kind in last_guest:
            receivers.append(SiblingPlan(receivers[last_guest[kind]], last_guest[kind], receiver))
        else:
            receivers.append(ReceiverPlan(requests[kind], shards[kind], loads, receiver))
        if receiver >= len(kinds) - guests:
            last_guest[kind] = receiver
    hops = max(receiver.hops for receiver in receivers)
    busiest = max(
        own.num_bytes + sum(other.bytes_from(rank) for other in receivers) for rank, own in enumerate(receivers)
    )
    largest = max((output.num_bytes for request in requests.values() for output in request.payload.outputs), default=0)
    room = 2 * bucket_bytes + largest if bucket_bytes else MEMORY // 2  # bytes of outputs, without messages
    # bytes of messages and of open outputs, without the largest output
    beside = max(MEMORY, largest * 5 // 4) - largest
    bucket_bytes = bucket_bytes or min(max((MEMORY - largest * 3 // 2) // 2, beside // 3), TO_TARGETS)
    size = min(bucket_bytes // MESSAGES_IN_FLIGHT, busiest // max(PER_HOP * hops, 1))
    count = max(-(-busiest // max(size, MIN_WINDOW * len(targets))), 1)
    stages = [inventory.ranks["pp"] for inventory in inventories]
    first_of_kind = dict(zip(reversed(kinds), reversed(receivers), strict=True))
    together = all(receiver.open_bytes() <= room for receiver in first_of_kind.values())
    fed = {receiver: kind for receiver, kind in enumerate(kinds) if receivers[receiver].hops == 0}
    schedule = SendSchedule(count, [0] * len(stages) if together else stages, fed, LAG * hops)
    return TargetPlans(tuple(receivers), schedule)


@dataclass(frozen=True, slots=True)
class TargetPlans:
    """The plans of all receivers, and the schedule that they share."""

    receivers: tuple[Feed, ...]
    schedule: SendSchedule

    def plans_of(self, rank: int) -> tuple[ExportPlan, ...]:
        """The plans for all receivers, with the parts that ``rank`` needs.

        For ``rank`` itself this is everything that it receives. For any other rank this is only what ``rank`` sends to
        it.
        """
        return tuple(
            plan.arriving(self.schedule) if receiver == rank else plan.sent_by(rank, self.schedule)
            for receiver, plan in enumerate(self.receivers)
        )


class SendSchedule:
    """When each rank sends to each receiver: in all messages, or in one period of them for each pipeline stage.

    With periods, fewer outputs are open at a receiver. Receivers begin with different stages, also receivers with equal
    targets, so that all stages send all the time.

    Args:
        count: messages that the busiest rank needs.
        stages: the pipeline stage of each rank.
        kinds: for each receiver to which ranks send their tensors, a value that is equal for equal targets.
        tail: messages behind these, in which only siblings pass on what they have.
    """

    def __init__(self, count: int, stages: Sequence[int], kinds: Mapping[int, object], tail: int) -> None:
        period_of = {stage: period for period, stage in enumerate(sorted(set(stages)))}
        self._periods = [period_of[stage] for stage in stages]
        self.num_periods = len(period_of)
        order = {kind: place for place, kind in enumerate(dict.fromkeys(kinds.values()))}
        by_kind = sorted(kinds, key=lambda receiver: order[kinds[receiver]])
        self._offsets = {receiver: place for place, receiver in enumerate(by_kind)}
        self.length = -(-count // self.num_periods)
        """Messages of a period."""
        self.num_messages = self.num_periods * self.length + tail
        """All messages."""

    def first(self, sender: int, receiver: int) -> int:
        """The number of the first message with which a rank sends to a receiver."""
        return (self._periods[sender] + self._offsets[receiver]) % self.num_periods * self.length

    @cached_property
    def _idle(self) -> tuple[Message, ...]:
        widths, streams = (HEADER,) * len(self._periods), ((),) * len(self._periods)
        return tuple(Message(number, widths, sum(widths), (), streams) for number in range(self.num_messages))

    def idle_plan(self, payload: Payload) -> ExportPlan:
        """The plan of a receiver to which a rank sends nothing but headers, as this rank needs it."""
        return ExportPlan(payload, ((),) * len(self._periods), self._idle)

    def widths(
        self, own: Mapping[int, tuple[int, int]], firsts: Mapping[int, int], idle: Sequence[int]
    ) -> list[tuple[int, ...]]:
        """Bytes of the windows of all ranks with each message.

        Args:
            own: for each rank that sends, its bytes with any message of its period but the last, and with the last.
            firsts: the first message of its period.
            idle: bytes of each rank with all other messages.
        """
        by_message = []
        for period in range(self.num_periods):
            middle, last = list(idle), list(idle)
            for rank, num_bytes in own.items():
                if firsts[rank] == period * self.length:
                    middle[rank], last[rank] = num_bytes
            by_message += [*[tuple(middle)] * (self.length - 1), tuple(last)]
        return by_message + [tuple(idle)] * (self.num_messages - len(by_message))


class ReceiverPlan:
    """The plan for one receiver: a stream from each rank. The receiver copies its own bytes at the pace of the streams.

    Args:
        request: the request of the receiver.
        shards: the shards of the request.
        loads: bytes that each rank has to send; the bytes for this receiver are added.
        receiver: the rank of the receiver.
    """

    hops = 0
    """The number of siblings through which the weights come."""

    def __init__(self, request: Request, shards: Sequence[SourceShard], loads: list[int], receiver: int) -> None:
        self._request, self._row_bytes, self._receiver = request, request.row_bytes, receiver
        self.payload = request.payload
        before = list(loads)
        self._ranges = assign_senders(shards, loads, receiver)
        self._bytes = list(map(sub, loads, before))
        own = self._ranges[receiver]
        self._bytes[receiver] = sum(aligned(part.rows * self._row_bytes[part.entry]) for part in own)
        self.num_bytes = sum(self._bytes)
        """Bytes that become outputs: bytes that travel here, and the receiver's own bytes."""

    def bytes_from(self, sender: int) -> int:
        """Bytes that travel from a rank."""
        return 0 if sender == self._receiver else self._bytes[sender]

    def open_bytes(self) -> int:
        """Bytes of outputs that are incomplete at once if all ranks send at the same time.

        For each stream two groups of outputs are counted: the largest group that arrives only in this stream, and the
        largest group that also arrives in other streams.
        """
        keys, sizes = self._request.keys, self._request.sizes
        streams = [dict.fromkeys(keys[part.entry] for part in ranges) for ranges in self._ranges]
        num_streams = Counter(chain.from_iterable(streams))
        own = [max((sizes[key] for key in stream if num_streams[key] == 1), default=0) for stream in streams]
        shared = {
            max((key for key in stream if num_streams[key] > 1), key=sizes.__getitem__, default=None)
            for stream in streams
        }
        return sum(own) + sum(sizes[key] for key in shared if key is not None)

    def arriving(self, schedule: SendSchedule) -> ExportPlan:
        """The plan of all streams, as the receiver needs it."""
        ranks = range(len(self._ranges))
        streams = tuple(self._cut(sender, schedule) for sender in ranks)
        widths_by_message = self._widths(ranks, streams, schedule)
        return assemble_plan(self._request, streams, widths_by_message, _rooms(widths_by_message))

    def sent_by(self, sender: int, schedule: SendSchedule) -> ExportPlan:
        """The plan of one stream, as its sender needs it: no message of it completes an output."""
        if not self._ranges[sender]:
            return schedule.idle_plan(self.payload)
        streams = tuple(self._cut(sender, schedule) if rank == sender else () for rank in range(len(self._ranges)))
        widths_by_message = self._widths([sender], streams, schedule)
        messages = zip(range(len(widths_by_message)), widths_by_message, _rooms(widths_by_message), strict=True)
        return ExportPlan(self.payload, streams, tuple(Message(*sizes, (), streams) for sizes in messages))

    def _cut(self, sender: int, schedule: SendSchedule) -> tuple[WindowRun, ...]:
        """Cut a stream into windows of one size: its share of the bytes, one row more, and alignment."""
        begins = first = schedule.first(sender, self._receiver)
        ranges: Sequence[SendRange] = self._ranges[sender]
        if schedule.num_periods > 1:
            ranges = _large_last(ranges, self._request.large)
        longest = max((self._row_bytes[part.entry] for part in ranges), default=0)
        sections = _before_large(ranges, self._request.large, schedule.length // RARE)
        count = schedule.length - GAP * (len(sections) - 1)
        window = HEADER + aligned(-(-self._bytes[sender] // count)) + longest + ALIGNMENT
        stream: tuple[WindowRun, ...] = ()
        for section in sections:
            stream += cut([section], self._row_bytes, [window], first=begins)[0]
            begins = stream[-1].last() + GAP if stream else begins
        assert num_messages((stream,)) <= first + schedule.length
        return stream

    def _widths(self, senders: Sequence[int], streams: Streams, schedule: SendSchedule) -> list[tuple[int, ...]]:
        """Bytes of all windows with each message. Senders other than the receiver have a header at least."""
        firsts = {sender: schedule.first(sender, self._receiver) for sender in senders if sender != self._receiver}
        own = {rank: widths(streams[rank], self._row_bytes, first + schedule.length) for rank, first in firsts.items()}
        return schedule.widths(own, firsts, [HEADER if rank in own else 0 for rank in range(len(streams))])


class SiblingPlan:
    """The plan for a guest that gets everything from its sibling, which passes its windows on.

    Args:
        source: the plan for the sibling.
        sibling, receiver: the ranks of the sibling and of the guest.
    """

    def __init__(self, source: Feed, sibling: int, receiver: int) -> None:
        self._source, self._sibling, self._receiver = source, sibling, receiver
        self._plan: RelayedPlan | None = None
        self.num_bytes: int = source.num_bytes
        """Bytes that become outputs."""
        self.hops: int = source.hops + 1
        """The number of siblings through which the weights come."""
        self.payload: Payload = source.payload

    def bytes_from(self, sender: int) -> int:
        """Bytes that travel from a rank."""
        return self.num_bytes if sender == self._sibling else 0

    def open_bytes(self) -> int:
        """As ``ReceiverPlan.open_bytes``."""
        return self._source.open_bytes()

    def arriving(self, schedule: SendSchedule) -> RelayedPlan:
        """The plan of what the sibling passes on. It is kept, since both siblings of a chain need it."""
        if self._plan is None:
            self._plan = _relayed(self._source.arriving(schedule), self._sibling, self._receiver)
        return self._plan

    def sent_by(self, sender: int, schedule: SendSchedule) -> ExportPlan:
        """As ``ReceiverPlan.sent_by``."""
        if sender == self._sibling:
            return self.arriving(schedule)
        return schedule.idle_plan(self.payload)


Feed = ReceiverPlan | SiblingPlan


def _relayed(plan: ExportPlan, sibling: int, receiver: int) -> RelayedPlan:
    """The plan of a receiver to which its sibling passes on what it gets, in as many messages: its last ones are idle.

    Args:
        plan: what the sibling gets.
        sibling, receiver: the rank that passes this on, and the rank that gets it.
    """
    count, num_ranks = len(plan.messages), len(plan.streams)
    idle, streams = tuple(HEADER * (rank != receiver) for rank in range(num_ranks)), ((),) * num_ranks
    room = sum(idle) + max(len(message.contents) for message in plan.messages)
    messages = [Message(number, idle, room, (), streams) for number in range(LAG)]
    for number, source in enumerate(plan.messages[: count - LAG], LAG):
        widths = tuple(width + len(source.contents) * (rank == sibling) for rank, width in enumerate(idle))
        messages.append(RelayedMessage(number, widths, room, source.done, streams, source, sibling))
    later = tuple(tuple(run._replace(message=run.message + LAG) for run in stream) for stream in plan.streams)
    return RelayedPlan(plan.payload, later, tuple(messages), sibling)


def _large_last(ranges: Sequence[SendRange], large: Collection[int]) -> Sequence[SendRange]:
    """Move an embedding behind the layers: a consumer may hold another stage's output layer when this stage begins."""
    ends_large = bool(ranges) and ranges[-1].entry in large
    return ranges if ends_large else sorted(ranges, key=lambda part: part.entry in large)


def _before_large(ranges: Sequence[SendRange], large: Collection[int], limit: int) -> list[Sequence[SendRange]]:
    """Split before each large entry that is not the first, so that the entries before it are complete when it begins.

    With more than ``limit`` such borders, do not split.
    """
    are_large = [part.entry in large for part in ranges]
    borders = [number for number, pair in enumerate(pairwise(are_large), 1) if pair == (False, True)]
    if len(borders) > limit:
        borders = []
    return [ranges[start:end] for start, end in pairwise([0, *borders, len(ranges)])]


def _rooms(widths_by_message: Sequence[tuple[int, ...]]) -> list[int]:
    """The bytes of memory of each message, equal for all. (Few widths differ, and most are one object.)"""
    distinct = {id(windows): windows for windows in widths_by_message}.values()
    return [max(map(sum, distinct))] * len(widths_by_message)
