"""Converts a ``torch_dist`` folder to an HF folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_bridge.convert.assemble import HFSlice, disassemble
from mcore_bridge.convert.conversion import units_of, widespread
from mcore_bridge.convert.reference_model import whole_model
from mcore_bridge.convert.to_hf import ToHF, stored_as
from mcore_bridge.errors import CheckpointError, plural
from mcore_bridge.rules.dtypes import cast
from mcore_bridge.rules.names import TOWER, count_mtp_layers, layer_of, plain_key
from mcore_bridge.weights.dist_checkpoint.files import ChunkLocation, LocatedParam, TorchDistReader
from mcore_bridge.weights.dist_checkpoint.folder import TorchDistFolder, in_layer_stack
from mcore_bridge.weights.not_built import Mtp
from mcore_bridge.weights.provenance import head_of


@dataclass(frozen=True, kw_only=True)
class FromDist(ToHF):
    """The conversion of a ``torch_dist`` folder to an HF folder."""

    @classmethod
    def plan(
        cls, source: Path, staging: Path, hf: Path, *, dtype: torch.dtype | None, file_bytes: int, mtp: Mtp
    ) -> FromDist:
        """Plan the conversion, and compare the checkpoint with the config."""
        folder = TorchDistFolder.open(source)
        sizes = ((tensor.properties.dtype, tensor.size.numel()) for tensor in folder.tensors.values())
        num_mtp_layers = count_mtp_layers(folder.tensors)
        vision = "train" if any(key.startswith(TOWER) for key in folder.tensors) else "text_only"
        own = dtype or widespread(sizes)
        model = whole_model(
            hf,
            dtype=own,
            num_mtp_layers=num_mtp_layers,
            metadata=folder.spelling,
            vision=vision,
            hybrid=folder.is_hybrid,
            head=head_of(hf, folder.tensors),
        )
        placed = _located_in(folder, model.placed)
        entries = tuple(
            stored_as(entry, folder.tensors[param.chunks[0].key].properties.dtype, dtype)
            for entry, param in zip(model.entries, placed, strict=True)
        )
        model = replace(model, entries=entries, placed=placed)
        units = tuple(units_of(entries, file_bytes))
        return cls(model=model, source=folder.path, staging=staging, units=units, mtp=mtp)

    def parts(self, number: int) -> Iterator[tuple[HFSlice, Tensor]]:
        """Yield the parts of a parameter that belong to its HF tensors."""
        entry = self.model.entries[number]
        whole = cast(entry.held.name, self._reader.read(self.model.placed[number]), entry.held.dtype)
        return disassemble(entry, {0: whole}, self.device)

    @cached_property
    def _reader(self) -> TorchDistReader:
        return TorchDistReader(TorchDistFolder.open(self.source))


def _located_in(folder: TorchDistFolder, placed: Sequence[LocatedParam]) -> tuple[LocatedParam, ...]:
    """The locations of parameters, with keys in the spelling of the folder.

    Raises:
        CheckpointError: naming tensors that are missing, unexpected or of another shape.
    """
    spelled = folder.spelled()
    if folder.is_stacked:
        num_layers = 1 + max(layer for key in _keys(placed) if (layer := layer_of(key)) is not None)
        placed = [_map(param, lambda location: _in_stack(location, num_layers)) for param in placed]
    missing = sorted({key for key in _keys(placed) if plain_key(key) not in spelled})
    unexpected = sorted(spelled.keys() - set(map(plain_key, _keys(placed))))
    if missing or unexpected:
        raise CheckpointError(
            f"{folder.path} does not fit its config: {plural(len(missing), 'tensor')} missing {missing[:8]}, "
            f"{len(unexpected)} unexpected {[spelled[key] for key in unexpected[:8]]}. Pass the HF config of this "
            "model with --hf"
        )

    def spell(location: ChunkLocation) -> ChunkLocation:
        return _checked(replace(location, key=spelled[plain_key(location.key)]), folder.tensors)

    return tuple(_map(param, spell) for param in placed)


def _keys(placed: Iterable[LocatedParam]) -> Iterator[str]:
    return (location.key for param in placed for location in param.chunks)


def _map(param: LocatedParam, change: Callable[[ChunkLocation], ChunkLocation]) -> LocatedParam:
    return replace(param, chunks=tuple(map(change, param.chunks)))


def _in_stack(location: ChunkLocation, num_layers: int) -> ChunkLocation:
    """The location of a layer's chunk in the tensor that stacks all layers."""
    key, layer = in_layer_stack(location.key)
    if layer is None:
        return location
    return replace(location, key=key, shape=(num_layers, *location.shape), offset=(layer, *location.offset))


def _checked(location: ChunkLocation, tensors: Mapping[str, Any]) -> ChunkLocation:
    shape = tuple(tensors[location.key].size)
    padded = location.padded and shape[0] >= location.shape[0]
    if shape[padded:] != location.shape[padded:]:
        raise CheckpointError(
            f"{location.key} has shape {shape}, the config takes {location.shape}: pass the config of this model"
        )
    return location
