"""Makes plans: who sends which part of what, and where streams are cut into messages. No process group is needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

from mcore_bridge.weights.alignment import ALIGNMENT, aligned
from mcore_bridge.weights.cut import HEADER, Part, Run, Streams, cut, num_messages, widths
from mcore_bridge.weights.entries import Inventory, entries_of
from mcore_bridge.weights.footprint import AHEAD, MEMORY, footprint
from mcore_bridge.weights.layout import Axes
from mcore_bridge.weights.mapping import WeightMapping
from mcore_bridge.weights.plan import ExportPlan, Goods, Message
from mcore_bridge.weights.slices import wanted_by
from mcore_bridge.weights.target import Target
from mcore_bridge.weights.turns import MIN_WINDOW, Way, phases_of, turns_of, ways_of, window_of

MESSAGE_BYTES = tuple(megabytes << 20 for megabytes in (512, 384, 256, 192, 128))
"""What to choose the bytes that a rank receives with a message from: fewer are slow, more no faster."""
OTHERWISE = 192 << 20
"""The same where none leaves the export within ``MEMORY``, since the largest tensors alone take most of it."""
MANY = 128
"""Ranks from which on only what takes least memory is planned: all of them at once would have too much on its way."""
TO_TARGETS = (256 << 20, 1 << 30)
"""Bounds of the same for all messages on their way, received and sent, where not all get everything."""
SHARED = 1 << 20
"""Bytes from which on those that hold a shard share the sending of it to a target."""


def plan_export(
    mapping: WeightMapping, axes: Axes, num_layers: int, inventories: Sequence[Inventory], *, bucket_bytes: int | None
) -> ExportPlan:
    """Plan the export to every rank of a model whose ``inventories`` are given by rank of the group that exports it.

    Args:
        bucket_bytes: of the messages that are on their way to a rank; more where one row takes more. None is as many as
            leave the whole export within ``MEMORY``.

    Raises:
        MappingError: what ``entries_of`` raises.
    """
    goods = Goods.of(entries_of(mapping, axes, num_layers, inventories))
    stages = [inventory.ranks["pp"] for inventory in inventories]
    keys = goods.together(bucket_bytes or MEMORY // 8)
    size, fused = bucket_bytes // AHEAD if bucket_bytes else OTHERWISE, max(goods.sizes_together(keys).values())
    allowed = 3 * bucket_bytes + fused if bucket_bytes else max(MEMORY, fused * 3 // 2)
    *others, leanest = ways_of(goods, keys, len(set(stages)), max(fused // 2, 4 * size), allowed - AHEAD * size)
    ways = iter([*others, leanest] if len(stages) <= MANY else [leanest])
    plan = (
        _gathered(goods, keys, stages, size, next(ways)) if bucket_bytes else _filling(goods, keys, stages, next(ways))
    )
    for way in ways:
        if footprint(plan) <= allowed:
            break
        plan = _gathered(goods, keys, stages, size, way)
    return plan


def _filling(goods: Goods, keys: Sequence[object], stages: Sequence[int], way: Way) -> ExportPlan:
    """With messages as large as leave the whole within ``MEMORY``; or of ``OTHERWISE``."""
    otherwise = _gathered(goods, keys, stages, OTHERWISE, way)
    rest = MEMORY - otherwise.open_bytes
    for size in (size for size in MESSAGE_BYTES if len(stages) <= MANY and AHEAD * size < rest):
        plan = _gathered(goods, keys, stages, size, way) if size != OTHERWISE else otherwise
        if footprint(plan) <= MEMORY:
            return plan
    return otherwise


def _gathered(goods: Goods, keys: Sequence[object], stages: Sequence[int], message_bytes: int, way: Way) -> ExportPlan:
    row_bytes = [entry.row_bytes for entry in goods.entries]
    dealt = _dealt(goods, [0] * len(stages), window_of(message_bytes, len(stages)) // 8)
    streams: list[list[Run]] = [[] for _ in stages]
    needed: list[tuple[int, ...]] = []
    turns = turns_of(way, dealt, stages)
    for phase in chain.from_iterable(phases_of(turn, row_bytes, stages, message_bytes) for turn in turns):
        found = cut([*phase.parts.values()], row_bytes, [phase.window] * len(phase.parts), first=len(needed))
        count = max(num_messages(found), len(needed) + 1)
        width, last_width = (
            max(each) for each in zip(*(widths(each, row_bytes, count) for each in found), strict=True)
        )
        for rank, runs in zip(phase.parts, found, strict=True):
            streams[rank] += runs
        for times, each in ((count - 1 - len(needed), width), (1, last_width)):
            windows = [HEADER] * len(stages)
            for rank in phase.parts:
                windows[rank] = each
            needed += [tuple(windows)] * times
    return _planned(goods, keys, tuple(map(tuple, streams)), needed)


def plan_targets(
    mapping: WeightMapping,
    axes: Axes,
    num_layers: int,
    inventories: Sequence[Inventory],
    targets: Sequence[Target],
    rank: int,
    *,
    bucket_bytes: int | None,
) -> tuple[ExportPlan, ...]:
    """Plan the export of what each rank asks for, as one rank has to know it. Only what is needed travels.

    Args:
        targets: by rank of the group.
        rank: whose plans these are.
        bucket_bytes: of the messages that are on their way to and from a rank, with what it takes of itself meanwhile.
            None leaves room for the largest tensor within ``MEMORY``, and for what else is in the making.

    Returns:
        For each rank what travels to it: to ``rank`` itself from everybody, to others from ``rank``.

    Raises:
        MappingError: what ``entries_of`` raises.
        TargetError: when the model cannot be cut as a target says.
    """
    entries = entries_of(mapping, axes, num_layers, inventories)
    found = {
        target: Goods.of(wanted_by(target, mapping, axes, num_layers, entries)) for target in dict.fromkeys(targets)
    }
    loads = [0] * len(targets)
    lanes = [_Lanes(found[target], loads, receiver) for receiver, target in enumerate(targets)]
    most = max(lane.taken + sum(each.bytes_of(rank) for each in lanes) for rank, lane in enumerate(lanes))
    largest = max((output.num_bytes for goods in found.values() for output in goods.outputs), default=0)
    room = 2 * bucket_bytes + largest if bucket_bytes else MEMORY // 2
    bucket_bytes = bucket_bytes or min(max((MEMORY - largest * 3 // 2) // 2, TO_TARGETS[0]), TO_TARGETS[1])
    count = max(-(-most // max(bucket_bytes // AHEAD, MIN_WINDOW * len(targets))), 1)
    stages = [inventory.ranks["pp"] for inventory in inventories]
    of_each = dict(zip(reversed(targets), reversed(lanes), strict=True))  # the first of those who ask for the same
    together = all(lane.in_the_making(bucket_bytes) <= room for lane in of_each.values())
    pace = _Pace(count, [0] * len(stages) if together else stages, targets)
    return tuple(
        lane.arriving(pace, bucket_bytes) if receiver == rank else lane.sent_by(rank, pace)
        for receiver, lane in enumerate(lanes)
    )


class _Pace:
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
        self, own: Sequence[tuple[int, int]], firsts: Sequence[int], idle: Sequence[int]
    ) -> list[tuple[int, ...]]:
        """Bytes of the windows of all ranks with each message.

        Args:
            own: of each rank, with any message of its turn but the last, and with the last.
            firsts: the first message of its turn.
            idle: of each rank, with all other messages.
        """
        needed = []
        for turn in range(self.num_turns):
            sends = [first == turn * self.times for first in firsts]
            middle, last = (
                tuple(each[at] if now else none for each, now, none in zip(own, sends, idle, strict=True))
                for at in (0, 1)
            )
            needed += [*[middle] * (self.times - 1), last]
        return needed


class _Lanes:
    """What travels to one receiver: a lane from each rank. What it has itself, it takes at the same pace."""

    def __init__(self, goods: Goods, loads: list[int], receiver: int) -> None:
        self._goods, self._receiver = goods, receiver
        self._row_bytes = [entry.row_bytes for entry in goods.entries]
        self._parts = _dealt(goods, loads, SHARED, receiver)
        self._bytes = [sum(aligned(part.rows * self._row_bytes[part.entry]) for part in each) for each in self._parts]
        self.taken = sum(self._bytes)
        """Bytes that become outputs: those that travel here, and its own."""

    def bytes_of(self, sender: int) -> int:
        """Bytes that travel from a rank."""
        return 0 if sender == self._receiver else self._bytes[sender]

    def in_the_making(self, bucket_bytes: int) -> int:
        """Bytes of outputs that are there at once where all lanes are busy.

        Of each lane the most that is given out together, of what comes by it alone and of what comes by others too.
        """
        keys = self._goods.together(bucket_bytes)
        sizes = self._goods.sizes_together(keys)
        lanes = [{keys[part.entry] for part in each} for each in self._parts]
        times = Counter(chain.from_iterable(lanes))
        own = [max((sizes[key] for key in lane if times[key] == 1), default=0) for lane in lanes]
        shared = {max((key for key in lane if times[key] > 1), key=sizes.__getitem__, default=None) for lane in lanes}
        return sum(own) + sum(sizes[key] for key in shared if key is not None)

    def arriving(self, pace: _Pace, bucket_bytes: int) -> ExportPlan:
        """All lanes."""
        ranks = range(len(self._parts))
        streams = tuple(self._cut(sender, pace) for sender in ranks)
        return _planned(self._goods, self._goods.together(bucket_bytes), streams, self._needed(ranks, streams, pace))

    def sent_by(self, sender: int, pace: _Pace) -> ExportPlan:
        """One lane, with whose messages nothing is given out."""
        streams = tuple(self._cut(sender, pace) if rank == sender else () for rank in range(len(self._parts)))
        needed = self._needed([sender], streams, pace)
        return ExportPlan(self._goods, streams, tuple(Message(*each, (), streams) for each in enumerate(needed)))

    def _cut(self, sender: int, pace: _Pace) -> tuple[Run, ...]:
        """A window has room for its share, for a row that does not fit any more, and for what alignment takes."""
        parts, first = self._parts[sender], pace.first(sender, self._receiver)
        longest = max((self._row_bytes[part.entry] for part in parts), default=0)
        window = HEADER + aligned(-(-self._bytes[sender] // pace.times)) + longest + ALIGNMENT
        (stream,) = cut([parts], self._row_bytes, [window], first=first)
        assert num_messages((stream,)) <= first + pace.times
        return stream

    def _needed(self, senders: Sequence[int], streams: Streams, pace: _Pace) -> list[tuple[int, ...]]:
        """Bytes of all windows with each message: of ranks that send, but for the receiver, a header at least."""
        travelling = [sender for sender in senders if sender != self._receiver]
        firsts = [pace.first(sender, self._receiver) for sender in range(len(streams))]
        own, idle = [(0, 0)] * len(streams), [0] * len(streams)
        for sender in travelling:
            own[sender] = widths(streams[sender], self._row_bytes, firsts[sender] + pace.times)
            idle[sender] = HEADER
        return pace.widths(own, firsts, idle)


def _dealt(goods: Goods, loads: list[int], shared: int, receiver: int | None = None) -> list[list[Part]]:
    """What each rank sends. Holders share a shard that matters, and others go to whoever has least to send so far.

    Args:
        loads: bytes that each rank has to send; counted on.
        shared: bytes of a shard that matters.
        receiver: the rank that all is for, who need not be sent what it holds.
    """
    streams: list[list[Part]] = [[] for _ in loads]
    for index, entry in enumerate(goods.entries):
        rows, row_bytes = entry.sent[0], entry.row_bytes
        for shard, holders in entry.holders.items():
            if receiver in holders:
                streams[receiver].append(Part(index, shard, 0, rows))
                continue
            shares = len(holders) if rows * row_bytes > shared and rows >= len(holders) else 1
            senders = holders if shares > 1 else (min(holders, key=loads.__getitem__),)
            for share, sender in enumerate(senders):
                first, last = rows * share // shares, rows * (share + 1) // shares
                streams[sender].append(Part(index, shard, first, last - first))
                loads[sender] += aligned((last - first) * row_bytes)
    return streams


def _planned(goods: Goods, keys: Sequence[object], streams: Streams, needed: Sequence[tuple[int, ...]]) -> ExportPlan:
    """A message for each of the widths that are ``needed``, with what is complete by then."""
    last = dict.fromkeys(keys, 0)
    for stream in streams:
        for run in stream:
            last[keys[run.entry]] = max(last[keys[run.entry]], run.last())
    groups: dict[object, dict[int, None]] = {}
    for key, places in zip(keys, goods.places, strict=True):
        groups.setdefault(key, {}).update(dict.fromkeys(output for output, _ in places))
    done: list[list[int]] = [[] for _ in needed]
    for key, outputs in groups.items():
        done[last[key]] += outputs
    messages = (Message(number, each, tuple(done[number]), streams) for number, each in enumerate(needed))
    return ExportPlan(goods, streams, tuple(messages))
