"""Makes a parameter of HF tensors, or HF tensors of a parameter, one parameter at a time.

A parameter is whole here, as one rank without parallelism holds it. All formats with whole parameters use this module,
and it has no code for a single format.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mcore_bridge.errors import CheckpointError, plural
from mcore_bridge.rules.dtypes import cast, dtype_name, is_exact
from mcore_bridge.rules.encoded import Encoded, EncodedSlice, Weight
from mcore_bridge.rules.mapping import WeightMapping, unstacked
from mcore_bridge.rules.names import foreign_prefix
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.rules.trace import Shape, Trace
from mcore_bridge.weights.plan.inventory import ParamEntry
from mcore_bridge.weights.source.source import Source
from mcore_bridge.weights.source.tied_tensors import require_equal


@dataclass(frozen=True, slots=True)
class HFSlice:
    """The part of a parameter in one HF tensor: the whole tensor, or expert ``index`` of a stack of experts."""

    name: str
    shape: Shape
    index: int | None


def parts_of(entry: ParamEntry) -> tuple[HFSlice, ...]:
    """The slices of HF tensors that make up a parameter, in the order of its layout."""
    return tuple(
        HFSlice(name, shape, index)
        for (name, index), shape in zip(map(unstacked, entry.hf), entry.trace.part_shapes, strict=True)
    )


def specs_of(entries: Iterable[ParamEntry]) -> Iterator[TensorSpec]:
    """Yield a spec for each HF tensor of a model, in the dtypes of its parameters."""
    seen: set[str] = set()
    for entry in entries:
        for part in parts_of(entry):
            shape = part.shape if part.index is None else (entry.stack, *part.shape)
            if part.name not in seen:
                yield TensorSpec(part.name, shape, entry.held.dtype)
            seen.add(part.name)
        first = parts_of(entry)[0]
        yield from (TensorSpec(name, first.shape, entry.held.dtype) for name in entry.copies)


class HFTensors(Protocol):
    """HF tensors by name, with a way to free their memory."""

    def __getitem__(self, name: str, /) -> Weight: ...

    def release(self, name: str) -> None:
        """Free the memory that was read for ``name``."""


def assemble(entry: ParamEntry, source: HFTensors, device: str = "cpu") -> Tensor:
    """Assemble a whole parameter from HF tensors."""
    return assemble_shard(entry.trace, 0, entry.hf, source, entry.held.dtype, device)


def assemble_shard(
    traced: Trace, number: int, hf: Sequence[str], source: HFTensors, dtype: torch.dtype, device: str = "cpu"
) -> Tensor:
    """Assemble one shard of a parameter, on the CPU, from its HF tensors. Padding is zero.

    Args:
        traced: the trace of the rule's layout.
        number: the number of the shard.
        hf: the HF names of the rule.
        device: where the shard is assembled. Casts happen on the CPU, because devices differ in the bits of NaN.
    """
    shard = traced.shard(number, [cast(name, _hf_tensor(source, name), dtype).to(device) for name in hf], dtype).cpu()
    for name in hf:
        source.release(unstacked(name)[0])
    return shard


def _hf_tensor(source: HFTensors, hf: str) -> Tensor | Encoded | EncodedSlice:
    """The tensor for an HF name of a rule; for the name of an expert in a stack, that expert's slice.

    ``to`` decodes an encoded tensor.
    """
    name, index = unstacked(hf)
    return source[name] if index is None else source[name][index]


def disassemble(
    entry: ParamEntry, shards: Mapping[int, Tensor], device: str = "cpu"
) -> Iterator[tuple[HFSlice, Tensor]]:
    """Yield the parts of a parameter that belong to its HF tensors, on the CPU. This is the inverse of ``assemble``.

    Args:
        shards: the shards by number; a whole parameter is the only shard, number 0.
        device: the device of the computation.
    """
    on_device = {number: shard.to(device) for number, shard in shards.items()}
    for number, part in enumerate(parts_of(entry)):
        yield part, entry.trace.part(number, on_device).cpu()


def check_source(
    entries: Iterable[ParamEntry],
    source: Source,
    mapping: WeightMapping,
    *,
    dtype: torch.dtype | None,
) -> tuple[str, ...]:
    """Compare an HF folder with the parameters to assemble from it.

    Args:
        dtype: the dtype to cast to, if a parameter cannot hold all values of its tensors.

    Returns:
        The names in the folder that no parameter uses.

    Raises:
        CheckpointError: naming tensors that are missing, unexpected, of another shape, or would lose bits.
    """
    entries = tuple(entries)
    wanted = {spec.name: spec for spec in specs_of(entries)}
    copies = {name for entry in entries for name in entry.copies}
    missing = [name for name in wanted if name not in source and name not in copies]
    unused = [name for name in source if name not in wanted or name in copies]
    unexpected = [name for name in unused if not mapping.is_unused(name)]
    if missing or unexpected:
        hint = foreign_prefix(unexpected, missing)
        raise CheckpointError(
            f"{source.folder} does not fit its config: {plural(len(missing), 'tensor')} missing {missing[:8]}, "
            f"{len(unexpected)} unexpected {unexpected[:8]}. Use the checkpoint of this config{hint}"
        )
    require_equal(source, mapping)
    for name, spec in wanted.items():
        if name not in copies:
            _check(name, source[name], spec, dtype)
    return tuple(unused)


def _check(name: str, tensor: Weight, spec: TensorSpec, dtype: torch.dtype | None) -> None:
    if tuple(tensor.shape) != spec.shape:
        raise CheckpointError(
            f"{name} has shape {tuple(tensor.shape)}, the config takes {spec.shape}: use the checkpoint of this config"
        )
    if isinstance(tensor, Tensor) and not is_exact(tensor.dtype, spec.dtype) and dtype is None:
        held, stored = dtype_name(spec.dtype), dtype_name(tensor.dtype)
        raise CheckpointError(
            f"{name} is {stored}, and {held} cannot hold all its values: --dtype {stored} keeps them, and "
            f"--dtype {held} casts"
        )
