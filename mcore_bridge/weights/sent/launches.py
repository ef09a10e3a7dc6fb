"""Encodes shards on a GPU: one launch of a kernel makes the codes and scales of all shards that a message needs.

Codes whose rows have places in an engine's memory are written there, and then a launch may make all of an export.

A launch for each of thousands of experts would take longer than to read their numbers. What a launch needs to know of
its shards does not change between exports, so a program keeps it on the GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mcore_bridge.rules.spec import ALIGNMENT
from mcore_bridge.weights.plan.boxes import NO_ROWS, WIDEST, RowSizes
from mcore_bridge.weights.plan.inventory import EncodedPart
from mcore_bridge.weights.sent.block_geometry import Blocks
from mcore_bridge.weights.sent.encoded_shard import as_bytes, has_kept_scales, kept_scales, not_finite
from mcore_bridge.weights.source.weight_format import WeightFormat
from mcore_bridge.weights.transfer.copier import Buffers, Made, RowPlaces, beside_peers, has_triton
from mcore_bridge.weights.transfer.endpoints import Merge

COLUMNS = (
    *("tensor", "first_tile", "tiles_in_a_row", "rows", "units", "grid_rows", "grid_columns"),
    *("codes", "scales", "parts_of_a_row"),
)
"""What the kernel needs to know of each shard; codes begin at a multiple of 16 bytes, and scales at an element."""
_MERGED = 1 << 25
"""Bytes of codes that a launch makes of merged weights, if these are several weights. They exist until it has run."""
_IN_A_BUFFER = 1 << 28
"""Bytes of codes that a launch makes without places. They exist until they are copied."""
_KEPT = 1 << 22
"""The scales of files for a launch stay on the GPU between exports if they have at most this many bytes."""


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


def runs_kernel(device: torch.device) -> bool:
    """Whether a kernel encodes shards on ``device``."""
    return device.type == "cuda" and has_triton()


class EncodeLaunch:
    """Shards that one launch encodes. They are alike, and have scales in files or have none.

    Codes are in one buffer, and scales in another one. All begin at addresses that suit the copies of an export.

    Args:
        is_placed: whether the rows of all these shards have places. Codes are then written there, not into a buffer.
    """

    def __init__(self, shards: Sequence[KernelShard], *, is_placed: bool = False) -> None:
        self.shards, self.blocks, self.is_placed = shards, shards[0].blocks, is_placed
        self._codes_at, self._scales_at = (
            [*accumulate((-(-size // unit) * unit for size in sizes), initial=0)]
            for sizes, unit in (
                ([shard.blocks.num_bytes for shard in shards], ALIGNMENT),
                ([_area(shard.blocks.grid) for shard in shards], max(1, WIDEST // self._item)),
            )
        )
        self._on_device: dict[torch.device, tuple[Tensor, Tensor, Tensor | None]] = {}
        self._of_files: tuple[WeightFormat, Tensor] | None = None
        self.numbers = np.array([number for shard in shards for number in (shard.codes, shard.scales)], dtype=np.int64)

    @property
    def _item(self) -> int:
        return self.blocks.scales.itemsize

    @cached_property
    def _offsets(self) -> Any:
        """Where the codes and the scales of each shard begin, in bytes, int64 [shards, 2]."""
        scales_at = [self._item * start for start in self._scales_at[:-1]]
        return np.array([self._codes_at[:-1], scales_at], dtype=np.int64).T

    def _tables(self, device: torch.device, places: RowPlaces | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """The table of shards, the shard of each tile, and the place of each part of a row, if rows have places.

        See ``triton_encode.encode_tiles``.
        """
        if device not in self._on_device:
            first, tiles, rows, line, parts = 0, [], [], 0, 1
            for shard, codes_at, scales_at in zip(self.shards, self._codes_at, self._scales_at, strict=False):
                of = shard.blocks
                units, at = of.shape[1] // of.unit, codes_at // WIDEST
                if places is not None:
                    at, parts = line, places.rows[shard.codes].starts.shape[1]
                rows.append((shard.codes, first, of.tiles[1], of.shape[0], units, *of.grid, at, scales_at, parts))
                first, line = first + _area(of.tiles), line + of.shape[0] * parts
                tiles.append(_area(of.tiles))
            owners = np.repeat(np.arange(len(tiles), dtype=np.int32), tiles)
            tables = torch.tensor(rows, dtype=torch.int32).to(device), torch.from_numpy(owners).to(device)
            codes = [shard.codes for shard in self.shards]
            self._on_device[device] = *tables, None if places is None else places.distances(codes, device)
        return self._on_device[device]

    def run(
        self, held: Buffers, form: WeightFormat, device: torch.device, into: RowPlaces | None = None
    ) -> tuple[Made, Tensor]:
        """Encode the shards.

        Args:
            held: the tensors of this rank, at the numbers of their codes.
            form: the format in which weights leave.
            into: the places of rows, if they have any.

        Returns:
            Codes and scales, or scales alone; and int32 [shards], 1 for each shard with a number that is not finite.
        """
        from mcore_bridge.weights.sent.triton_encode import encode_tiles

        table, owners, places = self._tables(device, into)
        if places is None:
            codes = torch.empty(self._codes_at[-1], dtype=torch.uint8, device=device)
        else:
            codes = places.view(torch.uint8)
        scales = torch.empty(self._scales_at[-1], dtype=self.blocks.scales, device=device)
        are_wrong = torch.zeros(len(self.shards), dtype=torch.int32, device=device)
        with beside_peers(device, frozenset() if into is None else into.memory.gpus):
            encode_tiles(
                self.blocks,
                held.addresses_on(device),
                table,
                owners,
                self._kept(form, device),
                codes,
                as_bytes(scales),
                are_wrong,
                aligned=held.is_aligned,
                places=places,
            )
        addresses = self._offsets + np.array([codes.data_ptr(), scales.data_ptr()])
        if places is not None:
            addresses[:, 0] = 0
        return Made(self.numbers, addresses.ravel(), lambda: [*self._views(codes, scales)]), are_wrong

    def _views(self, codes: Tensor, scales: Tensor) -> Iterator[Tensor]:
        """Codes and scales of each shard, as they are sent; no codes if their rows have places."""
        for shard, codes_at, scales_at in zip(self.shards, self._codes_at, self._scales_at, strict=False):
            dtype, shape = shard.blocks.codes
            own = codes[codes_at : codes_at + shard.blocks.num_bytes]
            yield codes[:0] if self.is_placed else own.view(dtype).view(shape)
            yield scales[scales_at : scales_at + _area(shard.blocks.grid)].view(shard.blocks.grid)

    def _kept(self, form: WeightFormat, device: torch.device) -> Tensor | None:
        """The scales of the files, in the places of the scales that are made; None if there are none."""
        if not has_kept_scales(self.shards[0].part, form):
            return None
        if self._of_files is not None and self._of_files[0] is form and self._of_files[1].device == device:
            return self._of_files[1]
        kept = as_bytes(torch.empty(self._scales_at[-1], dtype=self.blocks.scales))
        for shard, start in zip(self.shards, self._scales_at, strict=False):
            of_files = kept_scales(shard.part, shard.shard, form)
            assert of_files is not None
            kept[start : start + of_files.numel()] = of_files.flatten()
        own = kept.to(device)
        self._of_files = (form, own) if own.nbytes <= _KEPT else None
        return own


def launches_of(
    shards: Iterable[KernelShard], form: WeightFormat, merged: frozenset[int], placed: Container[int] = ()
) -> list[EncodeLaunch]:
    """The launches that encode shards.

    Args:
        merged: the codes whose weights have to be made first.
        placed: the codes whose rows have places.
    """
    groups: dict[tuple[object, ...], list[KernelShard]] = {}
    sizes: dict[tuple[object, ...], int] = {}
    for shard in shards:
        is_placed, is_merged = shard.codes in placed, shard.codes in merged
        key: tuple[object, ...] = is_placed, is_merged, shard.blocks.alike, has_kept_scales(shard.part, form)
        if is_merged or not is_placed:
            sizes[key] = sizes.get(key, 0) + shard.blocks.num_bytes
            key = (*key, sizes[key] // (_MERGED if is_merged else _IN_A_BUFFER))
        groups.setdefault(key, []).append(shard)
    return [EncodeLaunch(alike, is_placed=bool(key[0])) for key, alike in groups.items()]


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
            placed = places.rows if places is not None else ()
            known[key] = launches_of(dict.fromkeys(shards), self.form, frozenset(self.merges), placed)
        for launch in known[key]:
            with torch.cuda.device(self.device), torch.no_grad():
                of_merges = [shard.codes for shard in launch.shards if shard.codes in self.merges]
                merged = {number: merge(tensor) for number in of_merges for merge, tensor in [self.merges[number]]}
                sources = held.with_others([Made.of(merged)]) if merged else held
                into = places if launch.is_placed else None
                made, are_wrong = launch.run(sources, self.form, self.device, into)
                self._note(launch, are_wrong)
            yield made

    def _note(self, launch: EncodeLaunch, are_wrong: Tensor) -> None:
        flags = torch.empty(len(are_wrong), dtype=are_wrong.dtype, pin_memory=True)
        flags.copy_(are_wrong, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        self._waiting.append((launch, flags, event))

    def check(self, but: int = 0) -> None:
        """See ``Maker``: the numbers of all launches were finite."""
        while len(self._waiting) > but:
            done, flags, event = self._waiting.popleft()
            event.synchronize()
            if (wrong := flags.nonzero()).numel():
                self._waiting.clear()  # a check of other numbers must not meet them
                raise not_finite(done.shards[int(wrong[0])].part)


def _area(sizes: tuple[int, int]) -> int:
    rows, columns = sizes
    return rows * columns
