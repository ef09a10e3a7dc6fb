"""The codes and scales of one rank's shard of a weight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from mcore_bridge.errors import ExportError
from mcore_bridge.rules.codec import (
    Codec,
    as_bytes,
    codes_of,
    decoded,
    divided,
    is_overall_enough,
    new_overall,
    new_scales,
    numbers_of,
    scales_of,
)
from mcore_bridge.rules.encoded import Encoded
from mcore_bridge.rules.mapping import unstacked
from mcore_bridge.rules.scheme import joined_names
from mcore_bridge.rules.trace import Trace
from mcore_bridge.weights.plan.encoded_entries import cells_of, upright_of
from mcore_bridge.weights.plan.inventory import EncodedPart, Role
from mcore_bridge.weights.source.weight_format import WeightFormat
from mcore_bridge.weights.transfer.endpoints import Merge

_STRIP = 1 << 22
"""Numbers of a shard that are encoded at once. In fp32 they take 16 MB, and a few tensors of this size exist."""


def num_shared(roles: Mapping[Role, EncodedPart]) -> int:
    """How many numbers the holders of a weight agree on.

    For each block these are its largest magnitude, and whether it has changed. For each part with an overall number,
    this is the largest magnitude of the part.
    """
    scales, overall = roles["scales"], roles.get("overall")
    return (2 * _numel(scales.trace) if scales.shared else 0) + (len(overall.encodings) if overall else 0)


def _numel(traced: Trace) -> int:
    rows, columns = traced.shard_shape
    return rows * columns


def largest_of(roles: Mapping[Role, EncodedPart], agreed: Tensor) -> dict[str, Tensor]:
    """The largest magnitudes of the parts with an overall number, by plain names, in what holders agreed on."""
    if (overall := roles.get("overall")) is None:
        return {}
    return {overall.plain.hf[number]: agreed[own - len(overall.parts)] for own, number in enumerate(overall.parts)}


@dataclass(eq=False)
class EncodedShard:
    """The codes and scales of one shard, each made when it is needed.

    Attributes:
        roles: what the shard is sent as.
        shard: the number of the shard.
        held: this rank's tensor.
        merge: merges adapters into it; None: there are none.
        form: the format in which weights leave.
        trained: the largest magnitude for which training rounds the weight; None: the largest that it has. Merged
            weights have their own.
        agreed: what all holders of the weight agreed on; see ``partial``.
        largest: by plain names, the largest magnitudes of the parts that have an overall number, and of all weights
            that engines join with them.
        ready: what is made and not yet sent.
    """

    roles: Mapping[Role, EncodedPart]
    shard: int
    held: Tensor
    merge: Merge | None
    form: WeightFormat
    trained: Tensor | None = None
    agreed: Tensor | None = None
    largest: Mapping[str, Tensor] = field(default_factory=dict)
    ready: dict[Role, Tensor] = field(default_factory=dict)

    def values(self) -> Tensor:
        """The numbers of the shard."""
        return self.held if self.merge is None else self.merge(self.held)

    def made(self, role: Role) -> Tensor:
        """What is sent of the shard in this role, in the dtype and shape in which it is sent."""
        if role in self.ready:
            return self.ready.pop(role)
        with torch.no_grad():
            return {"codes": self.codes, "scales": self.scales, "overall": self.overall}[role]()

    @cached_property
    def _part(self) -> EncodedPart:
        return self.roles["scales"]

    @property
    def _names(self) -> list[str]:
        """The plain names of the parts."""
        return [self._part.plain.hf[number] for number in self._part.parts]

    @property
    def _codec(self) -> Codec:
        return self._part.encodings[0].codec

    def partial(self) -> Tensor:
        """What this shard adds to the numbers on which holders agree, [``num_shared``] of fp32."""
        values = self.values()
        grid = _Grid.of(self._part, self.shard, values.shape, values.device)
        numbers = []
        amax = self._amax(grid, values)
        if self._part.shared:
            numbers += [amax.flatten(), self._changed(grid, values).flatten()]
        if "overall" in self.roles:
            of_rows = amax.amax(1)
            if self.trained is not None and self.merge is None:
                of_rows = self.trained.to(of_rows).expand(len(of_rows))
            of_parts = amax.new_zeros(len(self._part.parts) + 1)
            numbers.append(of_parts.scatter_reduce_(0, grid.parts, of_rows, "amax")[:-1])
        return torch.cat(numbers)

    def codes(self) -> Tensor:
        """The codes of the shard, in the dtype and shape in which they are sent."""
        values = self.values()
        grid = _Grid.of(self._part, self.shard, values.shape, values.device)
        stored = self.ready["scales"] = self._stored_scales(grid, values)  # they follow in the same message
        scales = scales_of(self._codec, stored, grid.of_rows(self.overall() if "overall" in self.roles else None))
        codes = torch.empty((len(values), values.shape[1] // self._codec.per_byte), dtype=torch.uint8)
        codes = codes.to(values.device)
        for rows in grid.strips():
            numbers = divided(self._codec, values[rows], grid.spread(scales, rows))
            codes[rows] = codes_of(self._codec, numbers)
        part = self.roles["codes"]
        return codes.view(part.encodings[0].codes.dtype).view(part.trace.shard_shape)

    def scales(self) -> Tensor:
        """The scales of the shard; of all shards, if holders share blocks."""
        values = self.values()
        return self._stored_scales(_Grid.of(self._part, self.shard, values.shape, values.device), values)

    def overall(self) -> Tensor:
        """The overall number of each part."""
        return torch.stack([*map(self._overall_of, self._names)])

    def _overall_of(self, name: str) -> Tensor:
        """The files' number, if the numbers of all joined weights are enough. Otherwise a new one for all."""
        joined = [other for other in joined_names(name) if other in self.largest]
        amax = torch.stack([self.largest[other] for other in joined])
        fresh = new_overall(self._codec, amax.amax())
        if not self.is_kept:
            return fresh
        kept = self._kept_overall(joined, amax.device)
        return torch.where(is_overall_enough(self._codec, amax, kept).all(), kept[joined.index(name)], fresh)

    def _kept_overall(self, names: Iterable[str], device: torch.device) -> Tensor:
        """The overall numbers of weights in the files, fp32."""
        numbers = [self.form.files[unstacked(name)[0]].overall for name in names]
        return torch.cat([own.view(1) for own in numbers if own is not None]).to(device, torch.float32)

    @property
    def is_kept(self) -> bool:
        """Whether files have scales for all parts."""
        return has_kept_scales(self._part, self.form)

    def _kept(self) -> Tensor | None:
        return kept_scales(self._part, self.shard, self.form)

    def _stored_scales(self, grid: _Grid, values: Tensor) -> Tensor:
        dtype = self._part.encodings[0].scales.dtype
        if self._part.shared:
            assert self.agreed is not None
            size = _numel(self._part.trace)
            amax, changed = (own.view(self._part.trace.shard_shape) for own in self.agreed[: 2 * size].split(size))
        else:
            amax, changed = self._amax(grid, values), self._changed(grid, values)
        overall = None
        if "overall" in self.roles:
            overall = grid.of_rows(own := self.overall())
            if self.is_kept:  # scales beside another overall number are other scales
                changed = changed + grid.of_rows((own != self._kept_overall(self._names, own.device)).float())
        fresh = new_scales(self._codec, amax, dtype, powers=self._part.encodings[0].powers, overall=overall)
        kept = self._kept()
        if kept is None:
            return fresh
        return torch.where(changed > 0, as_bytes(fresh), kept.to(values.device)).view(dtype)

    def _amax(self, grid: _Grid, values: Tensor) -> Tensor:
        amax = grid.largest(lambda rows: values[rows].float().abs())
        if not bool(amax.isfinite().all()):
            raise not_finite(self._part)
        return amax

    def _changed(self, grid: _Grid, values: Tensor) -> Tensor:
        """For each block, 1 if its scale in the files does not reproduce its numbers, else 0; 1 without files."""
        if (kept := self._kept()) is None:
            return torch.ones(self._part.trace.shard_shape, device=values.device)
        dtype = self._part.encodings[0].scales.dtype
        overall = grid.of_rows(self._kept_overall(self._names, values.device)) if "overall" in self.roles else None
        scales = scales_of(self._codec, kept.to(values.device).view(dtype), overall)

        def differs(rows: slice) -> Tensor:
            own = grid.spread(scales, rows)
            numbers = numbers_of(self._codec, codes_of(self._codec, divided(self._codec, values[rows], own)))
            return (decoded(self._codec, numbers, own, values.dtype) != values[rows]).float()

        return grid.largest(differs)


def has_kept_scales(part: EncodedPart, form: WeightFormat) -> bool:
    """Whether files have scales for all parts of a weight."""
    return all(unstacked(part.plain.hf[own])[0] in form.files for own in part.parts)


def kept_scales(part: EncodedPart, shard: int, form: WeightFormat) -> Tensor | None:
    """The scales of the files in the shape of the grid of a shard, on the CPU, ``as_bytes``; None without files."""
    if not has_kept_scales(part, form):
        return None
    grids = []
    for index, number in enumerate(part.parts):
        expert, scales = unstacked(part.plain.hf[number])[1], _in_file(part, index, form).scales
        grids.append(as_bytes(scales if expert is None else scales[expert]))
    return part.trace.shard(0 if part.shared else shard, grids, grids[0].dtype)


def _in_file(part: EncodedPart, index: int, form: WeightFormat) -> Encoded:
    return form.files[unstacked(part.plain.hf[part.parts[index]])[0]]


def not_finite(part: EncodedPart) -> ExportError:
    """The error for a weight with a number that no code has."""
    return ExportError(
        f"{part.plain.hf[0]} must have finite numbers to be encoded, found NaN or infinity: see which step of the "
        "training made it, or whether the scales in its files are finite, too"
    )


@dataclass(frozen=True)
class _Grid:
    """Where the numbers of a shard lie in the grid of its blocks.

    Attributes:
        rows: the row of the grid for each row of the shard; the last one for rows that belong to no block.
        columns: likewise for columns; None if blocks follow each other from the first column on.
        parts: the part of each row of the grid; one more than the last part for rows of no part.
        shape: rows and columns of the grid.
        width: columns of a block.
        num_columns: columns of the shard.
    """

    rows: Tensor
    columns: Tensor | None
    parts: Tensor
    shape: tuple[int, int]
    width: int
    num_columns: int

    @classmethod
    def of(cls, part: EncodedPart, shard: int, shape: torch.Size, device: torch.device) -> _Grid:
        """The grid of a shard of ``shape``."""
        traced, plain = part.trace, upright_of(part.plain.trace, part.encodings[0])
        heights, widths = zip(*(cells_of(plain, encoding) for encoding in part.encodings), strict=True)
        num_rows, num_columns = traced.shard_shape
        rows, columns = torch.arange(shape[0]) // heights[0], None
        if part.shared:
            starts = {copy.part: copy.shard_start for copy in traced.to_mcore}
            dim = plain.to_mcore[0].dim
            index = torch.full((shape[dim],), traced.shard_shape[dim])
            for copy in plain.to_mcore:
                if copy.shard == shard and copy.part in part.parts:
                    own = part.parts.index(copy.part)
                    places = copy.part_start + torch.arange(copy.size) * copy.part_step
                    copy_of = index[copy.shard_start : copy.shard_start + copy.size]
                    copy_of.copy_(places // (heights, widths)[dim][own] + starts[own])
            rows, columns = (index, None) if dim == 0 else (rows, index)
        parts = torch.full((num_rows,), 0 if traced.to_mcore[0].dim else len(part.parts))
        for copy in traced.to_mcore:
            if copy.dim == 0 and (part.shared or copy.shard == shard):
                parts[copy.shard_start : copy.shard_start + copy.size] = copy.part
        return cls(
            rows.to(device),
            None if columns is None else columns.to(device),
            parts.to(device),
            (num_rows, num_columns),
            widths[0],
            shape[1],
        )

    def of_rows(self, of_parts: Tensor | None) -> Tensor | None:
        """For each row of the grid, the number of its part, [rows, 1]; 1 for rows of no part."""
        if of_parts is None:
            return None
        return torch.cat((of_parts, of_parts.new_ones(1)))[self.parts, None]

    def strips(self) -> Iterator[slice]:
        """Slices of the rows of the shard."""
        step = max(1, _STRIP // self.num_columns)
        for start in range(0, len(self.rows), step):
            yield slice(start, start + step)

    def largest(self, of_rows: Callable[[slice], Tensor]) -> Tensor:
        """The largest number in each block, fp32, with the shape of the grid. ``of_rows`` gives no negative numbers."""
        grid = torch.zeros(self.shape[0] + 1, self.shape[1], device=self.rows.device)
        for rows in self.strips():
            amax = self._of_columns(of_rows(rows))
            grid.scatter_reduce_(0, self.rows[rows, None].expand_as(amax), amax, "amax")
        return grid[:-1]

    def _of_columns(self, numbers: Tensor) -> Tensor:
        if self.columns is not None:
            amax = numbers.new_zeros(len(numbers), self.shape[1] + 1)
            return amax.scatter_reduce_(1, self.columns.expand_as(numbers), numbers, "amax")[:, :-1]
        missing = self.shape[1] * self.width - self.num_columns
        return torch.nn.functional.pad(numbers, (0, missing)).unflatten(1, (self.shape[1], self.width)).amax(-1)

    def spread(self, scales: Tensor, rows: slice) -> Tensor:
        """The scale of each number of some rows; 1 for numbers of no block."""
        ones = scales.new_ones(1, self.shape[1])
        own = torch.cat((scales, ones)).index_select(0, self.rows[rows])
        if self.columns is not None:
            return torch.cat((own, own.new_ones(len(own), 1)), 1).index_select(1, self.columns)
        return own.repeat_interleave(self.width, 1)[:, : self.num_columns]
