"""Parameters as one rank without parallelism holds them, made of HF tensors and taken apart again, one at a time.

What lies between HF and any format that keeps whole parameters is here; the formats themselves are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mcore_bridge.errors import CheckpointError
from mcore_bridge.rules.encoded import Encoded, EncodedSlice
from mcore_bridge.rules.mapping import WeightMapping, unstacked
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.rules.trace import Shape, Trace
from mcore_bridge.weights.dtypes import dtype_name, is_exact
from mcore_bridge.weights.files.decoded import Folder, Stored
from mcore_bridge.weights.plan.inventory import ParamEntry
from mcore_bridge.weights.ties import require_equal


@dataclass(frozen=True, slots=True)
class HFSlice:
    """One HF tensor that a parameter has something of: all of it, or the entry ``index`` of one for all experts."""

    name: str
    shape: Shape
    index: int | None


def parts_of(entry: ParamEntry) -> tuple[HFSlice, ...]:
    """The HF tensors of a parameter, in the order of its layout."""
    return tuple(
        HFSlice(name, shape, index)
        for (name, index), shape in zip(map(unstacked, entry.hf), entry.trace.part_shapes, strict=True)
    )


def names_of(entry: ParamEntry) -> Iterator[str]:
    """The HF tensors that a parameter is written to, further names of the first one among them."""
    yield from (part.name for part in parts_of(entry))
    yield from entry.copies


def specs_of(entries: Iterable[ParamEntry]) -> Iterator[TensorSpec]:
    """The HF tensors of a model, each once, in the dtypes of its parameters."""
    seen: set[str] = set()
    for entry in entries:
        for part in parts_of(entry):
            shape = part.shape if part.index is None else (entry.stack, *part.shape)
            if part.name not in seen:
                yield TensorSpec(part.name, shape, entry.held.dtype)
            seen.add(part.name)
        first = parts_of(entry)[0]
        yield from (TensorSpec(name, first.shape, entry.held.dtype) for name in entry.copies)


class Source(Protocol):
    """HF tensors by name, whose memory can be given back."""

    def __getitem__(self, name: str, /) -> Stored: ...

    def release(self, name: str) -> None:
        """Give back what was read for ``name``."""


def assemble(entry: ParamEntry, source: Source, device: str = "cpu") -> Tensor:
    """The parameter of an entry, from HF tensors."""
    return assemble_shard(entry.trace, 0, entry.hf, source, entry.held.dtype, device)


def assemble_shard(
    traced: Trace, number: int, hf: Sequence[str], source: Source, dtype: torch.dtype, device: str = "cpu"
) -> Tensor:
    """One shard of a parameter, on the CPU, from its HF tensors; what none of them has a value for is zero.

    Args:
        hf: the HF names of a rule.
        device: where it is put together. Casts are made on the CPU, as devices differ in the bits of NaN.
    """
    made = traced.shard(number, [_hf_tensor(source, name).to(dtype).to(device) for name in hf], dtype).cpu()
    for name in hf:
        source.release(unstacked(name)[0])
    return made


def _hf_tensor(source: Source, hf: str) -> Tensor | Encoded | EncodedSlice:
    """What ``source`` has of an HF name of a rule: a tensor, or the entry for one expert of that for all.

    An encoded one is decoded by ``to``.
    """
    name, index = unstacked(hf)
    return source[name] if index is None else source[name][index]


def disassemble(
    entry: ParamEntry, shards: Mapping[int, Tensor], device: str = "cpu"
) -> Iterator[tuple[HFSlice, Tensor]]:
    """What the HF tensors of an entry have of its parameter, on the CPU.

    Args:
        shards: by their numbers; the whole parameter is number 0 of one.
        device: where they are taken apart.
    """
    there = {number: shard.to(device) for number, shard in shards.items()}
    for number, part in enumerate(parts_of(entry)):
        yield part, entry.trace.part(number, there).cpu()


def check_source(
    entries: Iterable[ParamEntry],
    source: Folder,
    mapping: WeightMapping,
    *,
    num_mtp_layers: int,
    dtype: torch.dtype | None,
) -> tuple[str, ...]:
    """Hold a HF folder against the parameters that are to be made of it; the names that none of them takes.

    Args:
        num_mtp_layers: that are among the parameters; the folder may hold more.
        dtype: what tensors are cast to where a parameter cannot hold all their values.

    Raises:
        CheckpointError: naming what is missing, unexpected, of another shape, or would lose bits.
    """
    entries = tuple(entries)
    wanted = {spec.name: spec for spec in specs_of(entries)}
    copies = {name for entry in entries for name in entry.copies}
    missing = [name for name in wanted if name not in source and name not in copies]
    unused = [name for name in source if name not in wanted or name in copies]
    unexpected = [name for name in unused if not mapping.is_unused(name, num_mtp_layers=num_mtp_layers)]
    if missing or unexpected:
        raise CheckpointError(
            f"{source.folder} does not fit its config: {len(missing)} tensors missing {missing[:8]}, "
            f"{len(unexpected)} unexpected {unexpected[:8]}. Use the checkpoint of this config"
        )
    require_equal(source, mapping)
    for name, spec in wanted.items():
        if name not in copies:
            _check(name, source[name], spec, dtype)
    return tuple(unused)


def _check(name: str, tensor: Stored, spec: TensorSpec, dtype: torch.dtype | None) -> None:
    if tuple(tensor.shape) != spec.shape:
        raise CheckpointError(f"{name} has shape {tuple(tensor.shape)}, the config takes {spec.shape}")
    if isinstance(tensor, Tensor) and not is_exact(tensor.dtype, spec.dtype) and dtype is None:
        held, found = dtype_name(spec.dtype), dtype_name(tensor.dtype)
        raise CheckpointError(f"{name} is {found}, and {held} cannot hold all its values; --dtype {held} casts")
