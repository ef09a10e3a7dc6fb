"""Makes plans of exports in which every rank gets everything: which rank sends which bytes, cut into messages.

``all_to_all.py`` plans exports to the ranks of engines. Neither module needs a process group.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import chain, pairwise
from typing import NamedTuple

from mcore_bridge.rules.mapping import ModelAxes, WeightMapping
from mcore_bridge.rules.spec import aligned
from mcore_bridge.weights.plan.export_plan import MEMORY, MESSAGES_IN_FLIGHT, ExportPlan, Message, peak_bytes
from mcore_bridge.weights.plan.inventory import Encode, Inventory, ParamEntry, merge_inventories
from mcore_bridge.weights.plan.payload import Payload
from mcore_bridge.weights.plan.schedule import (
    MANY,
    Schedule,
    Sizes,
    candidate_schedules,
    large_entries,
    periods_of,
    phases_of,
    sized,
    window_of,
)
from mcore_bridge.weights.plan.stream import HEADER, SendRange, Streams, WindowRun, cut, num_messages, widths

MESSAGE_BYTES = tuple(megabytes << 20 for megabytes in (512, 384, 320, 256, 192, 128))
"""Candidates for the bytes that a rank receives with a message. Smaller messages are slow, larger ones no faster."""
BESIDE = (*MESSAGE_BYTES, *(megabytes << 20 for megabytes in (96, 64, 48, 32)))
"""Candidates for messages beside the few largest tensors, which may take most of ``MEMORY``."""
OTHERWISE = 192 << 20
"""Message size if no candidate keeps the export within ``MEMORY``: the largest tensors alone take most of it."""


class Request(NamedTuple):
    """The entries that a receiver gets, with the sizes that planning needs."""

    payload: Payload
    keys: Sequence[object]
    """The key of each entry; outputs of entries with one key are yielded together."""
    sizes: Mapping[object, int]
    """Bytes of the outputs of each key."""
    large: frozenset[int]
    """The few entries that take most memory."""
    rows: Sequence[int]
    """For each entry, the rows of a shard that travel."""
    row_bytes: Sequence[int]
    """Bytes of one row of each entry."""

    @classmethod
    def of(cls, entries: Sequence[ParamEntry], bucket_bytes: int | None) -> Request:
        """A request for ``entries``. The experts of a layer are yielded together if they take at most a bucket."""
        payload = Payload.of(entries)
        keys = payload.load_groups(bucket_bytes or MEMORY // 8)
        sizes = payload.sizes_together(keys)
        rows, row_bytes = [entry.sent[0] for entry in entries], [entry.row_bytes for entry in entries]
        return cls(payload, keys, sizes, large_entries(keys, sizes), rows, row_bytes)


def plan_export(
    mapping: WeightMapping,
    axes: ModelAxes,
    num_layers: int,
    inventories: Sequence[Inventory],
    *,
    bucket_bytes: int | None,
    encode: Encode = tuple,
) -> ExportPlan:
    """Plan the export of a whole model to every rank of a group.

    Args:
        inventories: the inventory of each rank of the group.
        encode: replaces the entries of weights that leave encoded.
        bucket_bytes: limits the messages in flight to a rank, unless one row takes more. By default messages are as
            large as possible, with the whole export within ``MEMORY``.

    Raises:
        MappingError: what ``merge_inventories`` raises.
    """
    request = Request.of(encode(merge_inventories(mapping, axes, num_layers, inventories)), bucket_bytes)
    stages = [inventory.ranks["pp"] for inventory in inventories]
    size, fused = bucket_bytes // MESSAGES_IN_FLIGHT if bucket_bytes else OTHERWISE, max(request.sizes.values())
    allowed = 3 * bucket_bytes + fused if bucket_bytes else max(MEMORY, fused * 3 // 2)
    schedules = candidate_schedules(
        request.payload, request.keys, stages, max(fused // 2, 4 * size), allowed - MESSAGES_IN_FLIGHT * size
    )
    ranges = assign_senders(shards_of(request, window_of(size, len(stages)) // 8), [0] * len(stages))
    for schedule in schedules:
        plan_with = cache(partial(_plan_with, request, stages, ranges, schedule))
        plan = plan_with(Sizes(size, size))
        if not bucket_bytes and len(stages) <= MANY:
            plan = _filling(plan_with, plan, request.large, allowed)
        if peak_bytes(plan) <= allowed:
            break
    return plan


def _filling(
    plan_with: Callable[[Sizes], ExportPlan], otherwise: ExportPlan, large: frozenset[int], allowed: int
) -> ExportPlan:
    """Plan with the largest messages that keep the export within ``MEMORY``, or else within ``allowed`` bytes."""
    largest = max(output.num_bytes for output in otherwise.payload.outputs)
    rest = MEMORY - max(largest, otherwise.open_bytes - largest)  # no size is small enough if many outputs are open
    sizes = [size for size in (BESIDE if large else MESSAGE_BYTES) if MESSAGES_IN_FLIGHT * size < rest]
    choices = [Sizes(max(size, MESSAGE_BYTES[-1]), size, large) for size in sizes]
    best = bisect_left(choices, True, key=lambda choice: peak_bytes(plan_with(choice)) <= MEMORY)
    if best < len(choices):
        return _larger(plan_with, plan_with(choices[best]), sizes[best], large, MEMORY)
    return _larger(plan_with, otherwise, OTHERWISE, large, allowed) if peak_bytes(otherwise) <= allowed else otherwise


def _larger(
    plan_with: Callable[[Sizes], ExportPlan], plan: ExportPlan, beside: int, large: frozenset[int], allowed: int
) -> ExportPlan:
    """Plan with the largest usual messages within ``allowed`` bytes. Return ``plan`` if it has fewer messages.

    Messages beside large entries do not change.
    """
    for size in (size for size in MESSAGE_BYTES if size > beside and large):
        larger = plan_with(Sizes(size, beside, large))
        if peak_bytes(larger) <= allowed and len(larger.messages) < len(plan.messages):
            return larger
    return plan


def _plan_with(
    request: Request, stages: Sequence[int], ranges: Sequence[Sequence[SendRange]], schedule: Schedule, sizes: Sizes
) -> ExportPlan:
    row_bytes = request.row_bytes
    streams: list[list[WindowRun]] = [[] for _ in stages]
    widths_by_message: list[tuple[int, ...]] = []
    size_of: list[int] = []
    periods = periods_of(schedule, ranges, stages)
    phases = chain.from_iterable(phases_of(period, row_bytes, stages, sizes.usual) for period in periods)
    for message_bytes, sent in sized(phases, row_bytes, sizes):
        window, first = window_of(message_bytes, len(sent)), len(widths_by_message)
        runs_by_sender = cut([*sent.values()], row_bytes, [window] * len(sent), first=first)
        count = max(num_messages(runs_by_sender), first + 1)
        pairs = [widths(runs, row_bytes, count) for runs in runs_by_sender]
        width, last_width = map(max, zip(*pairs, strict=True))
        size_of += [message_bytes] * (count - first)
        for rank, runs in zip(sent, runs_by_sender, strict=True):
            streams[rank] += runs
        for times, num_bytes in ((count - 1 - first, width), (1, last_width)):
            windows = [HEADER] * len(stages)
            for rank in sent:
                windows[rank] = num_bytes
            widths_by_message += [tuple(windows)] * times
    rooms: dict[int, int] = {}
    for size, total in zip(size_of, map(sum, widths_by_message), strict=True):
        rooms[size] = max(rooms.get(size, 0), total)
    return assemble_plan(request, tuple(map(tuple, streams)), widths_by_message, [rooms[size] for size in size_of])


class SourceShard(NamedTuple):
    """The rows of a shard that travel, and the ranks that may send them."""

    whole: SendRange
    holders: tuple[int, ...]
    shares: tuple[tuple[SendRange, int], ...]
    """The range and the bytes that each holder sends. With one share, one holder sends all."""


def shards_of(request: Request, shared_from: int) -> list[SourceShard]:
    """The shards of a request, in order. Of a shard with more than ``shared_from`` bytes, each holder sends a part."""
    shards = []
    for index, (entry, rows, row_bytes) in enumerate(
        zip(request.payload.entries, request.rows, request.row_bytes, strict=True)
    ):
        for shard, holders in entry.holders.items():
            count = len(holders) if rows * row_bytes > shared_from and rows >= len(holders) else 1
            borders = [rows * share // count for share in range(count + 1)]
            parts = [SendRange(index, shard, first, last - first) for first, last in pairwise(borders)]
            shares = tuple((part, aligned(part.rows * row_bytes)) for part in parts)
            shards.append(SourceShard(SendRange(index, shard, 0, rows), holders, shares))
    return shards


def assign_senders(
    shards: Sequence[SourceShard], loads: list[int], receiver: int | None = None
) -> list[list[SendRange]]:
    """Decide what each rank sends. A shard with one sender is sent by the holder with the fewest bytes so far.

    Args:
        shards: all shards to send.
        loads: bytes that each rank has to send; this function adds to them.
        receiver: the receiver, if there is only one. It copies its own shards itself.
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
    request: Request, streams: Streams, widths_by_message: Sequence[tuple[int, ...]], rooms: Sequence[int]
) -> ExportPlan:
    """Make the messages of a plan, each with the outputs that it completes.

    Args:
        streams: the stream of each rank.
        widths_by_message: bytes of the window of each rank, for each message.
        rooms: bytes of memory for the windows of each message.
    """
    payload, keys = request.payload, request.keys
    last = dict.fromkeys(keys, 0)
    for stream in streams:
        for run in stream:
            last[keys[run.entry]] = max(last[keys[run.entry]], run.last())
    groups: dict[object, dict[int, None]] = {}
    for key, destinations in zip(keys, payload.destinations, strict=True):
        groups.setdefault(key, {}).update(dict.fromkeys(output for output, _ in destinations))
    count = len(widths_by_message)
    done: list[list[int]] = [[] for _ in range(count)]
    for key, outputs in groups.items():
        done[last[key]] += outputs
    messages = tuple(map(Message, range(count), widths_by_message, rooms, map(tuple, done), [streams] * count))
    return ExportPlan(payload, streams, messages)
