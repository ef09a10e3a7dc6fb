"""Encodes shards on a GPU: one launch of a kernel makes the codes and scales of all shards that a message needs.

Codes whose rows have places in an engine's memory are written there, and then a launch may make all of an export.

A launch for each of thousands of experts would take longer than to read their numbers. What a launch needs to know of
its shards does not change between exports, so a program keeps it on the GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from mcore_bridge.errors import ExportError
from mcore_bridge.rules.codec import as_bytes
from mcore_bridge.weights.plan.boxes import NO_ROWS, ByteCopy, Rows, RowSizes, bytes_read, rows_without_places
from mcore_bridge.weights.plan.encoded_entries import cells_of, upright_of
from mcore_bridge.weights.plan.inventory import EncodedPart, Role
from mcore_bridge.weights.sent.encode_tables import (
    Blocks,
    EncodedTiles,
    EncodeTables,
    PlacedEncoder,
    TileLaunch,
)
from mcore_bridge.weights.sent.encoded_shard import has_kept_scales, kept_scales, not_finite
from mcore_bridge.weights.source.weight_format import WeightFormat
from mcore_bridge.weights.transfer.copier import Buffers, Made, RowPlaces
from mcore_bridge.weights.transfer.endpoints import Merge

_MERGED = 1 << 25
"""Bytes of codes that a launch makes of merged weights, if these are several weights. They exist until it has run."""
_IN_A_BUFFER = 1 << 28
"""Bytes of codes that a launch makes without places. They exist until they are copied."""


@dataclass(frozen=True, slots=True, eq=False)
class KernelShard:
    """A shard that the kernel can encode.

    Attributes:
        blocks: its blocks.
        part: its scales.
        shard: its number.
        codes, scales: the numbers of these tensors in an export. The numbers of the shard are in the tensor of either.
    """

    blocks: Blocks
    part: EncodedPart
    shard: int
    codes: int
    scales: int


def blocks_of(roles: Mapping[Role, EncodedPart]) -> Blocks | None:
    """The blocks of a weight that is sent so; None if ranks share a block, or the kernel does not know them."""
    part, codes = roles["scales"], roles["codes"]
    if part.shared or "overall" in roles:
        return None
    held, first = part.plain.held, part.encodings[0]
    height, width = cells_of(upright_of(part.plain.trace, first), first)
    rows, columns = held.shape
    blocks = Blocks(
        first.codec,
        (rows, columns),
        (min(height, rows), min(width, columns)),
        held.dtype,
        (first.codes.dtype, codes.trace.shard_shape),
        first.scales.dtype,
        first.powers,
    )
    return blocks if blocks.are_known else None


class EncodeLaunch:
    """Shards that one launch encodes. They are alike, and have scales in files or have none.

    Args:
        places: the places of the rows of their codes, if codes are written there, and not into a buffer.
        skips: whether to leave out tiles without a place, with their scales.
    """

    def __init__(
        self, shards: Sequence[KernelShard], places: Mapping[int, Rows] | None = None, *, skips: bool = False
    ) -> None:
        self.shards, self.tables = shards, EncodeTables.of(shards, places, skips=skips)
        self._launch = TileLaunch(self.tables)

    def run(
        self, held: Buffers, form: WeightFormat, device: torch.device, memory: Buffers | None
    ) -> tuple[Made, Tensor]:
        """Encode the shards.

        Args:
            held: the tensors of this rank, at the numbers of their codes.
            form: the format in which weights leave.
            device: the GPU of the tensors.
            memory: the engine's tensors, if rows of codes have places there.

        Returns:
            Codes and scales, or scales alone; and int32 [shards], 1 for each shard with a number that is not finite.
        """
        kept = self._launch.scales_of_files(form, partial(self.kept, form), device)
        made = self._launch.run(held, kept, device, memory)
        return Made(self.tables.numbers, made.addresses, lambda: [*self._views(made)]), made.are_wrong

    def _views(self, made: EncodedTiles) -> Iterator[Tensor]:
        """Codes and scales of each shard, as they are sent; no codes if their rows have places."""
        for shard, (codes, scales) in zip(self.shards, self.tables.views(made), strict=True):
            dtype, shape = shard.blocks.codes
            yield codes.view(dtype).view(shape) if self.tables.rows is None else codes
            yield scales

    def kept(self, form: WeightFormat) -> Tensor | None:
        """The scales of the files ``as_bytes``, in the places of the scales that are made; None if there are none."""
        if not has_kept_scales(self.shards[0].part, form):
            return None
        kept = as_bytes(torch.empty(self.tables.sizes[1], dtype=self.tables.blocks.scales))
        starts = self.tables.offsets[:, 1] // kept.itemsize
        for shard, start in zip(self.shards, starts.tolist(), strict=True):
            of_files = kept_scales(shard.part, shard.shard, form)
            assert of_files is not None
            kept[start : start + of_files.numel()] = of_files.flatten()
        return kept


def launches_of(
    shards: Iterable[KernelShard],
    form: WeightFormat,
    merged: frozenset[int],
    places: Mapping[int, Rows],
    *,
    skips: bool = False,
) -> list[EncodeLaunch]:
    """The launches that encode shards.

    Args:
        merged: the codes whose weights have to be made first.
        places: the places of rows, by the numbers of codes that have any.
        skips: whether to leave out tiles without a place, with their scales.
    """
    groups: dict[tuple[object, ...], list[KernelShard]] = {}
    sizes: dict[tuple[object, ...], int] = {}
    for shard in shards:
        is_placed, is_merged = shard.codes in places, shard.codes in merged
        key: tuple[object, ...] = is_placed, is_merged, shard.blocks.alike, has_kept_scales(shard.part, form)
        if is_merged or not is_placed:
            sizes[key] = sizes.get(key, 0) + shard.blocks.num_bytes
            key = (*key, sizes[key] // (_MERGED if is_merged else _IN_A_BUFFER))
        groups.setdefault(key, []).append(shard)
    return [EncodeLaunch(alike, places if key[0] else None, skips=skips) for key, alike in groups.items()]


def _needs_no_more(shards: Iterable[KernelShard], places: Mapping[int, Rows], copies: Iterable[ByteCopy]) -> bool:
    """Whether an engine needs scales of those blocks alone whose codes have places, and some codes have none."""
    placed = ((shard, shard.blocks.have_places(places[shard.codes]).ravel()) for shard in shards)
    partly = {shard.scales: (shard, are_placed) for shard, are_placed in placed if not are_placed.all()}
    of_scales: dict[int, list[ByteCopy]] = {scales: [] for scales in partly}
    for copy in copies if partly else ():
        if copy.source in of_scales:
            of_scales[copy.source].append(copy)
    for scales, (shard, are_placed) in partly.items():
        read = bytes_read(of_scales[scales], are_placed.size * shard.blocks.scales.itemsize)
        if (read.reshape(are_placed.size, -1).any(1) & ~are_placed).any():
            return False
    return bool(partly)


@dataclass(eq=False)
class ShardEncoder:
    """Makes the codes and scales of an export.

    Attributes:
        shards: the shards, by the numbers of their codes and of their scales.
        form: the format in which weights leave.
        merges: functions from tensors to what is encoded, with these tensors, by the numbers of the codes.
        device: the GPU of all tensors of this rank.
        launches: the launches of earlier exports, by what each made.
        rows: see ``Maker``.
        places: see ``Maker``.
    """

    shards: Mapping[int, KernelShard]
    form: WeightFormat
    merges: Mapping[int, tuple[Merge, Tensor]]
    device: torch.device
    launches: dict[tuple[int, ...] | None, list[EncodeLaunch]]
    rows: RowSizes = field(default_factory=lambda: NO_ROWS)
    places: RowPlaces | None = None
    _waiting: deque[tuple[EncodeLaunch, Tensor, torch.cuda.Event]] = field(default_factory=deque)
    """Launches with their flags, and the event after which these are known."""

    @classmethod
    def of_shard(cls, shard: KernelShard, form: WeightFormat, device: torch.device) -> ShardEncoder:
        """An encoder of one shard."""
        return cls({shard.codes: shard, shard.scales: shard}, form, {}, device, {})

    @property
    def numbers(self) -> frozenset[int]:
        """See ``Maker``."""
        return frozenset(self.shards)

    @property
    def is_placed(self) -> bool:
        """See ``Maker``. Then all are made at once."""
        return self.places is not None and 2 * len(self.places.rows) == len(self.shards)

    def make(self, numbers: Sequence[int] | None, held: Buffers) -> Iterator[Made]:
        """See ``Maker``."""
        key = None if numbers is None or (self.is_placed and not self.merges) else tuple(numbers)
        places, known = self.places, self.launches
        if places is not None:
            known = places.launches.setdefault(frozenset(self.merges), {})
        if key not in known:
            shards = self.shards.values() if key is None else map(self.shards.__getitem__, key)
            rows = places.rows if places is not None else {}
            known[key] = launches_of(dict.fromkeys(shards), self.form, frozenset(self.merges), rows)
        for launch in known[key]:
            with torch.cuda.device(self.device), torch.no_grad():
                of_merges = [shard.codes for shard in launch.shards if shard.codes in self.merges]
                merged = {number: merge(tensor) for number in of_merges for merge, tensor in [self.merges[number]]}
                sources = held.with_others([Made.of(merged)]) if merged else held
                memory = None if places is None else places.memory
                made, are_wrong = launch.run(sources, self.form, self.device, memory)
                self._waiting.append((launch, *self._on_host(are_wrong)))
            yield made

    @property
    def is_of_parameters(self) -> bool:
        """See ``Maker``."""
        return not self.merges

    def placed(
        self, places: Mapping[int, Rows], copies: Iterable[ByteCopy]
    ) -> tuple[PlacedEncoder, Callable[[int, int], ExportError]]:
        """See ``Maker``."""
        copies = [*copies]
        read, shards = {copy.source for copy in copies}, [*dict.fromkeys(self.shards.values())]
        whole = [shard for shard in shards if shard.codes in places]
        alone = [shard for shard in shards if shard.scales in read and not {shard.codes} & (read | places.keys())]
        nowhere = {shard.codes: rows_without_places(shard.blocks.row_size) for shard in alone}
        skips = _needs_no_more(whole, places, copies)
        launches = launches_of(whole, self.form, frozenset(), places, skips=skips)
        launches += launches_of(alone, self.form, frozenset(), nowhere)
        kept = [launch.kept(self.form) for launch in launches]
        encoder = PlacedEncoder(
            [launch.tables for launch in launches],
            [None if own is None else own.view(torch.uint8).numpy() for own in kept],
        )
        parts = [[shard.part for shard in launch.shards] for launch in launches]
        return encoder, lambda launch, shard: not_finite(parts[launch][shard])

    def _on_host(self, are_wrong: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        flags = torch.empty(len(are_wrong), dtype=are_wrong.dtype, pin_memory=True)
        flags.copy_(are_wrong, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return flags, event

    def check(self, *, waits: bool) -> None:
        """See ``Maker``: the numbers of launches were finite."""
        while self._waiting and (waits or self._waiting[0][-1].query()):
            done, flags, event = self._waiting.popleft()
            event.synchronize()
            if (wrong := flags.nonzero()).numel():
                self._waiting.clear()  # a check of other numbers must not meet them
                raise not_finite(done.shards[int(wrong[0])].part)
