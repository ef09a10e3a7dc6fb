"""Replaces the entries of weights that leave encoded by entries of their codes and scales.

A layout moves slices along one dim. If its borders are borders of blocks, the layout moves codes and scales like the
weight, in larger steps. If a border lies within a block, several shards share the block. Then the holders of the weight
make the scales of the whole HF tensor together, and one of them sends these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from mcore_bridge.errors import MappingError
from mcore_bridge.rules.layout import TRANSPOSED, Rearrange
from mcore_bridge.rules.mapping import unstacked
from mcore_bridge.rules.scheme import Encoding, Scheme
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.rules.trace import Copy, Shape, Trace
from mcore_bridge.weights.plan.inventory import EncodedPart, ParamEntry, Role

Cells = tuple[int, int]
"""Rows and columns of a shard for which one element stands."""


def plain_specs(entries: Sequence[ParamEntry]) -> dict[str, TensorSpec]:
    """The HF tensors of entries, by name; a stack of experts once, with its whole shape."""
    specs: dict[str, TensorSpec] = {}
    for entry in entries:
        for hf, shape in zip(entry.hf, entry.trace.part_shapes, strict=True):
            name, number = unstacked(hf)
            specs[name] = TensorSpec(name, shape if number is None else (entry.stack, *shape), entry.held.dtype)
    return specs


def encoded_entries(entries: Sequence[ParamEntry], scheme: Scheme) -> tuple[ParamEntry, ...]:
    """``entries``, with the codes and scales of each encoded weight in its place.

    Raises:
        MappingError: a weight has another shape in the scheme, or is cut or turned so that its codes cannot follow; the
            message names all such weights.
    """
    if not scheme.held:
        return tuple(entries)
    sent: list[ParamEntry] = []
    wrong: list[str] = []
    known: Known = {}
    for entry in entries:
        try:
            sent += _entries_of(entry, scheme.held, known)
        except _UnfitError as problem:
            wrong.append(f"{entry.hf[0]} {problem}")
    if wrong:
        raise MappingError(f"{len(wrong)} weights cannot leave encoded: {'; '.join(wrong[:5])}")
    return tuple(sent)


class _UnfitError(Exception):
    """Why a weight cannot be encoded on this mesh. The name of the weight is put before the message."""


def _entries_of(entry: ParamEntry, held: Mapping[str, Encoding], known: Known) -> Iterator[ParamEntry]:
    """The entries for a parameter: for each encoding of its parts, codes and the rest; and plain parts, if any."""
    by_form: dict[object, list[int]] = {}
    encodings = [held.get(unstacked(hf)[0]) for hf in entry.hf]
    for part, encoding in enumerate(encodings):
        by_form.setdefault(_form(encoding), []).append(part)
    if by_form.keys() == {None}:
        yield entry
        return
    for form, parts in by_form.items():
        if form is None:
            yield replace(entry, hf=tuple(entry.hf[part] for part in parts), trace=_of_parts(entry.trace, parts))
            continue
        of_parts = tuple(encoding for encoding in encodings if encoding is not None and _form(encoding) == form)
        yield from _encoded(entry, tuple(parts), of_parts, known)


def _form(encoding: Encoding | None) -> object:
    """A key that is equal for parts whose codes and scales can lie in one tensor."""
    if encoding is None:
        return None
    kinds = tuple((part.dtype, len(part.shape)) for part in encoding.stored)
    return encoding.codec.kind, encoding.codec.block[-2:] if encoding.grid[-2:] != (1, 1) else "tensor", kinds


def _encoded(
    entry: ParamEntry, parts: tuple[int, ...], encodings: tuple[Encoding, ...], known: Known
) -> Iterator[ParamEntry]:
    for part, encoding in zip(parts, encodings, strict=True):
        shape, stack = entry.trace.part_shapes[part], (entry.stack,) if entry.stack else ()
        if encoding.shape != (*stack, *shape):
            raise _UnfitError(f"has the shape {encoding.shape} in the scheme, and {(*stack, *shape)} in the model")
    if entry.copies:
        raise _UnfitError("has second names, under which codes are not written")
    like = tuple((encoding.codec, encoding.order, encoding.shape, encoding.codes.shape) for encoding in encodings)
    key = id(entry.trace), parts, like
    if key not in known:
        known[key] = _traces(entry.trace, parts, encodings)
    traces = known[key]

    def made(role: Role, trace: Trace, *, shared: bool = False) -> ParamEntry:
        encoded = EncodedPart(role, entry, parts, encodings, trace, shared)
        return _entry(
            encoded, [_numbered(spec.name, entry.hf[p]) for spec, p in zip(encoded.specs, parts, strict=True)]
        )

    yield made("codes", traces.codes)
    yield made("scales", traces.scales, shared=traces.is_shared)
    if encodings[0].overall is not None:
        yield made("overall", side_by_side([(1,)] * len(parts), 0), shared=True)
    for part, encoding in zip(parts, encodings, strict=True):
        if unstacked(entry.hf[part])[1] in (None, 0):  # once for a stack of experts
            for spec in (*encoding.stored[len(encoding.parts) :], *encoding.beside):
                whole = side_by_side([(spec.numel,)], 0)
                yield _entry(EncodedPart("constant", entry, (part,), (encoding,), whole, True, spec), [spec.name])


class _Traces(NamedTuple):
    """The traces of codes and of scales, and whether several shards may have numbers of one block."""

    codes: Trace
    scales: Trace
    is_shared: bool


Known = dict[object, _Traces]
"""Traces by what they follow from. Equal layers and experts share one object, by which plans know them as equal."""


def _traces(traced: Trace, parts: tuple[int, ...], encodings: tuple[Encoding, ...]) -> _Traces:
    first, upright = encodings[0], upright_of(traced, encodings[0])
    words = first.shape[first.order[-1]] // first.codes.shape[len(first.order) - 1]  # columns in an element of codes
    codes = coarser(upright, parts, (1, words))
    if codes is None:
        raise _UnfitError(f"is cut within {words} numbers whose codes lie together: choose a smaller (expert) tp")
    codes = _with_trailing(codes, first.codes.shape[len(first.order) :])
    blocks = {encoding.codec.block[-2:] for encoding in encodings}
    scales = coarser(upright, parts, cells_of(upright, first)) if len(blocks) == 1 else None
    if scales is not None:
        return _Traces(codes, scales, False)
    grids = [encoding.grid[-2:] for encoding in encodings]
    return _Traces(codes, side_by_side(grids, upright.to_hf[0].dim, upright.to_hf[0].view), True)


def _entry(encoded: EncodedPart, hf: Sequence[str]) -> ParamEntry:
    """The entry of what is sent. If all holders of the weight have it, each of them may send it."""
    plain, spec = encoded.plain, encoded.specs[0]
    holders = dict(plain.holders)
    if encoded.shared:
        holders = {0: tuple(sorted({rank for ranks in holders.values() for rank in ranks}))}
    held = TensorSpec(sent_name(encoded), encoded.trace.shard_shape, spec.dtype)
    return ParamEntry(held, tuple(hf), encoded.trace, holders, plain.stack, encoded=encoded)


def sent_name(encoded: EncodedPart) -> str:
    """The name of what a rank sends of encoded parts of a parameter, after its canonical name."""
    return f"{encoded.plain.held.name}:{encoded.specs[0].name}"


def _numbered(name: str, hf: str) -> str:
    """The name of a part, with the number of the expert in a stack."""
    number = unstacked(hf)[1]
    return name if number is None else f"{name}[{number}]"


def _of_parts(traced: Trace, parts: Sequence[int]) -> Trace:
    """The trace of some parts alone, which get new numbers. The shard stays whole."""
    number = {part: index for index, part in enumerate(parts)}
    to_mcore, to_hf = (
        tuple(replace(copy, part=number[copy.part]) for copy in copies if copy.part in number)
        for copies in (traced.to_mcore, traced.to_hf)
    )
    return Trace(tuple(traced.part_shapes[part] for part in parts), traced.shard_shape, to_mcore, to_hf)


def upright_of(traced: Trace, encoding: Encoding) -> Trace:
    """The trace from parts in the order of their codes. Codes that are stored transposed may need no turn at all."""
    turned = encoding.order[-2:] != tuple(sorted(encoding.order[-2:]))
    views = {copy.view for copy in traced.to_mcore}
    if not turned and views == {None}:
        return traced
    if not turned and encoding.codec.per_byte == 1 and len(views) == 1:
        return traced
    if turned and len(views) == 1 and None not in views:
        shapes = tuple((shape[1], shape[0]) for shape in traced.part_shapes)
        to_mcore, to_hf = (
            tuple(replace(copy, view=None) for copy in copies) for copies in (traced.to_mcore, traced.to_hf)
        )
        return Trace(shapes, traced.shard_shape, to_mcore, to_hf)
    raise _UnfitError("has another orientation than its codes: choose another method, such as fp8")


def cells_of(traced: Trace, encoding: Encoding) -> Cells:
    """Rows and columns of a shard that share a scale."""
    rows, columns = encoding.codec.block[-2:]
    return (rows, columns) if traced.to_mcore[0].view is None else (columns, rows)


def coarser(traced: Trace, parts: Sequence[int], cells: Cells) -> Trace | None:
    """The trace of tensors in which one element stands for a cell of rows and columns, as the shards have them.

    None if a slice begins or ends within a cell, other than at the end of a part that is the end of the shard. Behind
    another end rows of another part would count as rows of the cell, even if that part leaves in another form.
    """
    of_parts = _of_parts(traced, parts)
    to_mcore, to_hf = (
        tuple(_coarse(copy, of_parts, cells) for copy in copies) for copies in (of_parts.to_mcore, of_parts.to_hf)
    )
    if None in to_mcore or None in to_hf:
        return None
    view = next((copy.view for copy in of_parts.to_mcore), None)
    turned = cells if view is None else cells[::-1]
    shapes = tuple(_shape(shape, turned) for shape in of_parts.part_shapes)
    return Trace(
        shapes,
        _shape(traced.shard_shape, cells),
        tuple(copy for copy in to_mcore if copy is not None),
        tuple(copy for copy in to_hf if copy is not None),
    )


def _shape(shape: Shape, cells: Cells) -> Shape:
    return tuple(-(-size // cell) for size, cell in zip(shape, cells, strict=True))


def _coarse(copy: Copy, traced: Trace, cells: Cells) -> Copy | None:
    cell, length = cells[copy.dim], traced.part_shapes[copy.part][copy.part_dim]
    if cell == 1:
        return copy
    ends = copy.part_start + copy.size, copy.shard_start + copy.size
    is_whole = copy.size % cell == 0 or ends == (length, traced.shard_shape[copy.dim])
    if copy.part_step > 1 or copy.part_start % cell or copy.shard_start % cell or not is_whole:
        return None
    return replace(
        copy, part_start=copy.part_start // cell, shard_start=copy.shard_start // cell, size=-(-copy.size // cell)
    )


def _with_trailing(traced: Trace, trailing: Shape) -> Trace:
    """The trace of tensors whose elements are tensors of shape ``trailing``."""
    if not trailing:
        return traced
    shapes = tuple((*shape, *trailing) for shape in traced.part_shapes)
    return Trace(shapes, (*traced.shard_shape, *trailing), traced.to_mcore, traced.to_hf)


def whole_trace(shape: Shape, encoding: Encoding) -> Trace:
    """The trace of a matrix whose single shard has the orientation of its codes."""
    is_turned = encoding.order[-2:] != tuple(sorted(encoding.order[-2:]))
    return side_by_side([shape], 0, TRANSPOSED if is_turned else None)


def side_by_side(shapes: Sequence[Shape], dim: int, view: Rearrange | None = None) -> Trace:
    """The trace of a single shard that has whole parts of these shapes one after the other along its ``dim``.

    With ``view``, the shard has them transposed.
    """
    copies, start = [], 0
    turned = [shape if view is None else shape[::-1] for shape in shapes]
    for part, shape in enumerate(turned):
        copies.append(Copy(part, 0, dim, 0, start, shape[dim], view=view))
        start += shape[dim]
    whole = (*turned[0][:dim], start, *turned[0][dim + 1 :])
    return Trace(tuple(shapes), whole, tuple(copies), tuple(copies))
