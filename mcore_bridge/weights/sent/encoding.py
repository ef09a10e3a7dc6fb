"""Encodes weights for an export: each rank makes the codes and scales of its own shards, as a message needs them.

A block keeps the scale of the folder that the model came from if this scale reproduces all numbers of the block.
Otherwise it gets a new one. So an untrained model leaves as its files, and after a step only changed blocks are new. A
block that several ranks share gets its scale from the maximum over these ranks. A maximum is exact in any order, so the
bits do not depend on the mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor

from mcore_bridge.errors import ExportError
from mcore_bridge.rules.codec import (
    Codec,
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
from mcore_bridge.rules.scheme import Scheme
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.rules.trace import Trace
from mcore_bridge.weights.plan.encoded_entries import cells_of, encoded_entries, upright_of, whole_trace
from mcore_bridge.weights.plan.inventory import EncodedPart, ParamEntry, Role
from mcore_bridge.weights.source.weight_format import WeightFormat
from mcore_bridge.weights.transfer.collectives import Group
from mcore_bridge.weights.transfer.endpoints import Merge, check_storage
from mcore_bridge.weights.transfer.failures import raise_on_all
from mcore_bridge.weights.transfer.program import Program

Held = tuple[Mapping[str, Tensor], Mapping[str, Merge]]
"""Tensors by name, and the functions from some of them to what is sent."""
_STRIP = 1 << 22
"""Numbers of a shard that are encoded at once. In fp32 they take 16 MB, and a few tensors of this size exist."""


def encode_shards(
    program: Program,
    group: Group,
    tensors: Mapping[str, Tensor],
    merges: Mapping[str, Merge],
    shard_of: Callable[[str], int],
    form: WeightFormat,
) -> Held:
    """Add the codes and scales that an export of ``program`` sends to the tensors of this rank.

    All ranks of the group call it together. They communicate once, and only if a block lies on several ranks.

    Args:
        tensors, merges: this rank's tensors by canonical name, and the functions from some of them to what is sent.
        shard_of: gives the number of the shard that this rank has of a tensor.
        form: the format in which weights leave.

    Returns:
        Tensors and functions, with names for what is sent of encoded weights.

    Raises:
        ExportError: on every rank, when a weight of any rank has a number that is not finite, or no memory.
    """
    encoded = {entry.held.name: entry.encoded for entry in program.entries if entry.encoded is not None}
    if not encoded:
        return tensors, merges
    weights: dict[tuple[str, tuple[int, ...]], dict[Role, EncodedPart]] = {}
    for part in encoded.values():
        if part.constant is None:
            weights.setdefault((part.plain.held.name, part.parts), {})[part.role] = part
    sizes = {key: _num_shared(roles) for key, roles in weights.items()}
    with raise_on_all(group, kind=ExportError):
        shards = {
            key: EncodedShard(roles, shard_of(key[0]), _values(key[0], tensors, merges), form)
            for key, roles in weights.items()
            if key[0] in tensors
        }
        device = next((tensor.device for tensor in tensors.values()), group.device)
        shared = torch.zeros(sum(sizes.values()), device=device)
        for key, own in zip(sizes, shared.split([*sizes.values()]), strict=True):
            if len(own) and key in shards:
                own.copy_(shards[key].partial())
    if len(shared):
        shared = group.maximum(shared).to(device)
        for key, own in zip(sizes, shared.split([*sizes.values()]), strict=True):
            if len(own) and key in shards:
                shards[key].agreed = own
    sources, made = dict(tensors), dict(merges)
    for sent, part in encoded.items():
        if (held := tensors.get(part.plain.held.name)) is not None:
            sources[sent] = held
            if part.constant is not None:
                made[sent] = partial(_constant, form, part)
            else:
                made[sent] = partial(_made, shards[part.plain.held.name, part.parts], part.role)
    return sources, made


def encoded_tensors(
    name: str, weight: Tensor, scheme: Scheme, form: WeightFormat, *, stack: int = 0
) -> Iterator[tuple[str, Tensor]]:
    """Encode one whole weight: the names and tensors of its codes and scales, or the weight if ``scheme`` lacks it.

    Args:
        name: its plain name; of an expert in a stack with its number, as ``weight[3]``. The results then have it, too.
        weight: the numbers of the weight, or of this expert.
        stack: the number of experts in the stack; 0 for other weights.
    """
    if (encoding := scheme.held.get(unstacked(name)[0])) is None:
        yield name, weight
        return
    traced = whole_trace(tuple(weight.shape), encoding)
    if traced.to_mcore[0].view is not None:
        weight = weight.mT
    spec = TensorSpec.of(name, weight)
    entries = encoded_entries([ParamEntry(spec, (name,), traced, {0: (0,)}, stack)], scheme)
    roles = {of.encoded.role: of.encoded for of in entries if of.encoded is not None and of.encoded.constant is None}
    shard = EncodedShard(roles, 0, lambda: weight.detach(), form)
    with torch.no_grad():
        if _num_shared(roles):
            shard.agreed = shard.partial()
        for of in entries:
            assert of.encoded is not None
            made = _constant(form, of.encoded, weight) if of.encoded.constant else _made(shard, of.encoded.role, weight)
            yield of.hf[0], made.view(of.shape_of(0))


def _constant(form: WeightFormat, part: EncodedPart, held: Tensor) -> Tensor:
    spec = part.constant
    assert spec is not None
    own = form.raw(spec.name)
    own = torch.tensor(part.encodings[0].shape, dtype=spec.dtype) if own is None else own.flatten()
    return own.to(held.device)


def _values(name: str, tensors: Mapping[str, Tensor], merges: Mapping[str, Merge]) -> Callable[[], Tensor]:
    """A function that gives the numbers of this rank's shard, with merged adapters if there are any."""
    held = tensors[name].detach()
    check_storage({name: held})
    return lambda: merges[name](held) if name in merges else held


def _made(shard: EncodedShard, role: Role, held: Tensor) -> Tensor:
    with torch.no_grad():
        return {"codes": shard.codes, "scales": shard.scales, "overall": shard.overall}[role]()


def _num_shared(roles: Mapping[Role, EncodedPart]) -> int:
    """How many numbers the holders of a weight agree on.

    For each block these are its largest magnitude, and whether it has changed. For each part with an overall number,
    this is the largest magnitude of the part.
    """
    scales, overall = roles["scales"], roles.get("overall")
    return (2 * _numel(scales.trace) if scales.shared else 0) + (len(overall.encodings) if overall else 0)


def _numel(traced: Trace) -> int:
    rows, columns = traced.shard_shape
    return rows * columns


@dataclass
class EncodedShard:
    """The codes and scales of one shard, each made when it is needed.

    Attributes:
        roles: what the shard is sent as.
        shard: the number of the shard.
        values: gives the numbers of the shard.
        form: the format in which weights leave.
        agreed: what all holders of the weight agreed on; see ``partial``.
    """

    roles: Mapping[Role, EncodedPart]
    shard: int
    values: Callable[[], Tensor]
    form: WeightFormat
    agreed: Tensor | None = None
    _scales: Tensor | None = field(default=None, repr=False)

    @cached_property
    def _part(self) -> EncodedPart:
        return self.roles["scales"]

    @property
    def _codec(self) -> Codec:
        return self._part.encodings[0].codec

    def partial(self) -> Tensor:
        """What this shard adds to the numbers on which holders agree, [``_num_shared``] of fp32."""
        values = self.values()
        grid = _Grid.of(self._part, self.shard, values.shape, values.device)
        numbers = []
        amax = self._amax(grid, values)
        if self._part.shared:
            numbers += [amax.flatten(), self._changed(grid, values).flatten()]
        if "overall" in self.roles:
            of_parts = amax.new_zeros(len(self._part.parts) + 1)
            numbers.append(of_parts.scatter_reduce_(0, grid.parts, amax.amax(1), "amax")[:-1])
        return torch.cat(numbers)

    def codes(self) -> Tensor:
        """The codes of the shard, in the dtype and shape in which they are sent."""
        values, part = self.values(), self.roles["codes"]
        grid = _Grid.of(self._part, self.shard, values.shape, values.device)
        stored = self._stored_scales(grid, values)
        scales = scales_of(self._codec, stored, grid.of_rows(self.overall() if "overall" in self.roles else None))
        codes = torch.empty((len(values), values.shape[1] // self._codec.per_byte), dtype=torch.uint8)
        codes = codes.to(values.device)
        for rows in grid.strips():
            numbers = divided(self._codec, values[rows], grid.spread(scales, rows))
            codes[rows] = codes_of(self._codec, numbers)
        spec = part.encodings[0].codes
        return codes.view(spec.dtype).view(part.trace.shard_shape)

    def scales(self) -> Tensor:
        """The scales of the shard; of all shards, if holders share blocks."""
        if (stored := self._scales) is None:
            values = self.values()
            stored = self._stored_scales(_Grid.of(self._part, self.shard, values.shape, values.device), values)
        self._scales = None
        return stored

    def overall(self) -> Tensor:
        """The overall number of each part."""
        assert self.agreed is not None
        part = self.roles["overall"]
        amax = self.agreed[-len(part.encodings) :]
        fresh = new_overall(self._codec, amax)
        if not self._is_kept:
            return fresh
        kept = self._kept_overall(amax.device)
        return torch.where(is_overall_enough(self._codec, amax, kept), kept, fresh)

    def _kept_overall(self, device: torch.device) -> Tensor:
        """The overall number of each part in the files, fp32."""
        numbers = [self._in_file(index).overall for index in range(len(self._part.parts))]
        return torch.cat([own.view(1) for own in numbers if own is not None]).to(device, torch.float32)

    @property
    def _is_kept(self) -> bool:
        return all(unstacked(self._part.plain.hf[part])[0] in self.form.files for part in self._part.parts)

    def _in_file(self, index: int) -> Encoded:
        return self.form.files[unstacked(self._part.plain.hf[self._part.parts[index]])[0]]

    def _kept(self, device: torch.device) -> Tensor | None:
        """The scales of the files in the shape of the grid; None if there are none."""
        if not self._is_kept:
            return None
        grids = []
        for index, number in enumerate(self._part.parts):
            expert = unstacked(self._part.plain.hf[number])[1]
            scales = self._in_file(index).scales
            own = scales if expert is None else scales[expert]
            grids.append(_as_bytes(own))
        traced = self._part.trace
        return traced.shard(0 if self._part.shared else self.shard, grids, grids[0].dtype).to(device)

    def _stored_scales(self, grid: _Grid, values: Tensor) -> Tensor:
        """The scales as they are sent. Codes leave them for the scales, which follow in the same message."""
        if self._scales is not None:
            return self._scales
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
            if self._is_kept:  # scales beside another overall number are other scales
                changed = changed + grid.of_rows((own != self._kept_overall(own.device)).float())
        fresh = new_scales(self._codec, amax, dtype, powers=self._part.encodings[0].powers, overall=overall)
        kept = self._kept(values.device)
        self._scales = fresh if kept is None else torch.where(changed > 0, _as_bytes(fresh), kept).view(dtype)
        return self._scales

    def _amax(self, grid: _Grid, values: Tensor) -> Tensor:
        amax = grid.largest(lambda rows: values[rows].float().abs())
        if not bool(amax.isfinite().all()):
            raise ExportError(
                f"{self._part.plain.hf[0]} must have finite numbers to be encoded, found NaN or infinity: see which "
                "step of the training made it"
            )
        return amax

    def _changed(self, grid: _Grid, values: Tensor) -> Tensor:
        """For each block, 1 if its scale in the files does not reproduce its numbers, else 0; 1 without files."""
        if (kept := self._kept(values.device)) is None:
            return torch.ones(self._part.trace.shard_shape, device=values.device)
        dtype = self._part.encodings[0].scales.dtype
        overall = grid.of_rows(self._kept_overall(values.device)) if "overall" in self.roles else None
        scales = scales_of(self._codec, kept.view(dtype), overall)

        def differs(rows: slice) -> Tensor:
            own = grid.spread(scales, rows)
            numbers = numbers_of(self._codec, codes_of(self._codec, divided(self._codec, values[rows], own)))
            return (decoded(self._codec, numbers, own, values.dtype) != values[rows]).float()

        return grid.largest(differs)


def _as_bytes(scales: Tensor) -> Tensor:
    """Scales of one byte as uint8, since torch cannot choose between elements of float8."""
    return scales.view(torch.uint8) if scales.dtype.itemsize == 1 else scales


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
