"""Makes plans: who sends which part of what, and where streams are cut into messages. No process group is needed.

Those of exports to engine ranks are in ``all_to_all.py``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import chain, pairwise
from typing import NamedTuple

from mcore_bridge.rules.layout import Axes
from mcore_bridge.rules.mapping import WeightMapping
from mcore_bridge.weights.plan.alignment import aligned
from mcore_bridge.weights.plan.budget import MEMORY, MESSAGES_IN_FLIGHT
from mcore_bridge.weights.plan.export_plan import ExportPlan, Message
from mcore_bridge.weights.plan.inventory import Inventory, ParamEntry, merge_inventories
from mcore_bridge.weights.plan.memory import peak_bytes
from mcore_bridge.weights.plan.message_sizes import Sizes, large_entries, sized
from mcore_bridge.weights.plan.payload import Payload
from mcore_bridge.weights.plan.schedule import MANY, Schedule, candidate_schedules, phases_of, turns_of, window_of
from mcore_bridge.weights.plan.stream import HEADER, SendRange, Streams, WindowRun, cut, num_messages, widths

MESSAGE_BYTES = tuple(megabytes << 20 for megabytes in (512, 384, 320, 256, 192, 128))
"""What to choose the bytes that a rank receives with a message from: fewer are slow, more no faster."""
BESIDE = (*MESSAGE_BYTES, *(megabytes << 20 for megabytes in (96, 64, 48, 32)))
"""The same beside the few largest tensors, which may take most of ``MEMORY``."""
OTHERWISE = 192 << 20
"""The same where none leaves the export within ``MEMORY``, since the largest tensors alone take it, or nearly."""


class Request(NamedTuple):
    """What is asked for."""

    payload: Payload
    keys: Sequence[object]
    """For each entry, what is given out together."""
    sizes: Mapping[object, int]
    """By key, the bytes of that."""
    large: frozenset[int]
    """The few entries that take most."""
    rows: Sequence[int]
    """Of each entry, what travels of a shard."""
    row_bytes: Sequence[int]
    """Of each entry."""

    @classmethod
    def of(cls, entries: Sequence[ParamEntry], bucket_bytes: int | None) -> Request:
        """Whose experts of a layer are given out together where they take no more than a bucket."""
        goods = Payload.of(entries)
        keys = goods.load_groups(bucket_bytes or MEMORY // 8)
        sizes = goods.sizes_together(keys)
        rows, row_bytes = [entry.sent[0] for entry in entries], [entry.row_bytes for entry in entries]
        return cls(goods, keys, sizes, large_entries(keys, sizes), rows, row_bytes)


def plan_export(
    mapping: WeightMapping, axes: Axes, num_layers: int, inventories: Sequence[Inventory], *, bucket_bytes: int | None
) -> ExportPlan:
    """Plan the export to every rank of a model whose ``inventories`` are given by rank of the group that exports it.

    Args:
        bucket_bytes: of the messages that are on their way to a rank; more where one row takes more. None is as many as
            leave the whole export within ``MEMORY``.

    Raises:
        MappingError: what ``merge_inventories`` raises.
    """
    wanted = Request.of(merge_inventories(mapping, axes, num_layers, inventories), bucket_bytes)
    stages = [inventory.ranks["pp"] for inventory in inventories]
    size, fused = bucket_bytes // MESSAGES_IN_FLIGHT if bucket_bytes else OTHERWISE, max(wanted.sizes.values())
    allowed = 3 * bucket_bytes + fused if bucket_bytes else max(MEMORY, fused * 3 // 2)
    ways = candidate_schedules(
        wanted.payload, wanted.keys, stages, max(fused // 2, 4 * size), allowed - MESSAGES_IN_FLIGHT * size
    )
    parts = assign_senders(shards_of(wanted, window_of(size, len(stages)) // 8), [0] * len(stages))
    for way in ways:
        gathered = cache(partial(_gathered, wanted, stages, parts, way))
        plan = gathered(Sizes(size, size))
        if not bucket_bytes and len(stages) <= MANY:
            plan = _filling(gathered, plan, wanted.large, allowed)
        if peak_bytes(plan) <= allowed:
            break
    return plan


def _filling(
    gathered: Callable[[Sizes], ExportPlan], otherwise: ExportPlan, large: frozenset[int], allowed: int
) -> ExportPlan:
    """With messages as large as leave the whole within ``MEMORY``, or else within what is ``allowed``."""
    largest = max(output.num_bytes for output in otherwise.payload.outputs)
    rest = MEMORY - max(largest, otherwise.open_bytes - largest)  # no size helps where many are in the making
    sizes = [size for size in (BESIDE if large else MESSAGE_BYTES) if MESSAGES_IN_FLIGHT * size < rest]
    choices = [Sizes(max(size, MESSAGE_BYTES[-1]), size, large) for size in sizes]
    place = bisect_left(choices, True, key=lambda each: peak_bytes(gathered(each)) <= MEMORY)
    if place < len(choices):
        return _larger(gathered, gathered(choices[place]), sizes[place], large, MEMORY)
    return _larger(gathered, otherwise, OTHERWISE, large, allowed) if peak_bytes(otherwise) <= allowed else otherwise


def _larger(
    gathered: Callable[[Sizes], ExportPlan], plan: ExportPlan, beside: int, large: frozenset[int], allowed: int
) -> ExportPlan:
    """With messages as large as is ``allowed`` but ``beside`` large entries; or ``plan``, where that has fewer."""
    for size in (size for size in MESSAGE_BYTES if size > beside and large):
        larger = gathered(Sizes(size, beside, large))
        if peak_bytes(larger) <= allowed and len(larger.messages) < len(plan.messages):
            return larger
    return plan


def _gathered(
    wanted: Request, stages: Sequence[int], parts: Sequence[Sequence[SendRange]], way: Schedule, sizes: Sizes
) -> ExportPlan:
    row_bytes = wanted.row_bytes
    streams: list[list[WindowRun]] = [[] for _ in stages]
    needed: list[tuple[int, ...]] = []
    size_of: list[int] = []
    turns = turns_of(way, parts, stages)
    phases = chain.from_iterable(phases_of(turn, row_bytes, stages, sizes.usual) for turn in turns)
    for message_bytes, sent in sized(phases, row_bytes, sizes):
        window = window_of(message_bytes, len(sent))
        found = cut([*sent.values()], row_bytes, [window] * len(sent), first=len(needed))
        count = max(num_messages(found), len(needed) + 1)
        width, last_width = (
            max(each) for each in zip(*(widths(each, row_bytes, count) for each in found), strict=True)
        )
        size_of += [message_bytes] * (count - len(needed))
        for rank, runs in zip(sent, found, strict=True):
            streams[rank] += runs
        for times, each in ((count - 1 - len(needed), width), (1, last_width)):
            windows = [HEADER] * len(stages)
            for rank in sent:
                windows[rank] = each
            needed += [tuple(windows)] * times
    rooms: dict[int, int] = {}
    for size, each in zip(size_of, map(sum, needed), strict=True):
        rooms[size] = max(rooms.get(size, 0), each)
    return assemble_plan(wanted, tuple(map(tuple, streams)), needed, [rooms[size] for size in size_of])


class SourceShard(NamedTuple):
    """What travels of a shard of an entry, and who may send it."""

    whole: SendRange
    holders: tuple[int, ...]
    shares: tuple[tuple[SendRange, int], ...]
    """What each holder sends, and the bytes of that; or what one of them does, all of it."""


def shards_of(wanted: Request, shared: int) -> list[SourceShard]:
    """All shards, in order; found once for all who want the same. Holders share one of more than ``shared`` bytes."""
    found = []
    for index, (entry, rows, row_bytes) in enumerate(
        zip(wanted.payload.entries, wanted.rows, wanted.row_bytes, strict=True)
    ):
        for shard, holders in entry.holders.items():
            count = len(holders) if rows * row_bytes > shared and rows >= len(holders) else 1
            borders = [rows * share // count for share in range(count + 1)]
            parts = [SendRange(index, shard, first, last - first) for first, last in pairwise(borders)]
            shares = tuple((part, aligned(part.rows * row_bytes)) for part in parts)
            found.append(SourceShard(SendRange(index, shard, 0, rows), holders, shares))
    return found


def assign_senders(
    shards: Sequence[SourceShard], loads: list[int], receiver: int | None = None
) -> list[list[SendRange]]:
    """What each rank sends. What is not shared goes to whoever has least to send so far.

    Args:
        shards: all that travels.
        loads: bytes that each rank has to send; counted on.
        receiver: the rank that all is for, who need not be sent what it holds.
    """
    streams: list[list[SendRange]] = [[] for _ in loads]
    for whole, holders, shares in shards:
        if receiver in holders:
            streams[receiver].append(whole)
            continue
        senders = holders if len(shares) == len(holders) else (min(holders, key=loads.__getitem__),)
        for sender, (part, num_bytes) in zip(senders, shares, strict=True):
            streams[sender].append(part)
            loads[sender] += num_bytes
    return streams


def assemble_plan(
    wanted: Request, streams: Streams, needed: Sequence[tuple[int, ...]], rooms: Sequence[int]
) -> ExportPlan:
    """A message for each of the widths that are ``needed``, with what is complete by then."""
    goods, keys = wanted.payload, wanted.keys
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
    numbers = range(len(needed))
    messages = tuple(map(Message, numbers, needed, rooms, map(tuple, done), [streams] * len(needed)))
    return ExportPlan(goods, streams, messages)
