"""A ``torch_dist`` folder to a HF folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_bridge.convert.conversion import units_of, widespread
from mcore_bridge.convert.parameters import HFSlice, disassemble
from mcore_bridge.convert.reference_model import whole_model
from mcore_bridge.convert.to_hf import ToHF, stored_as
from mcore_bridge.errors import CheckpointError
from mcore_bridge.rules.names import count_mtp_layers, layer_of, plain_key
from mcore_bridge.weights.dist_checkpoint.files import ChunkLocation, LocatedParam, TorchDistReader
from mcore_bridge.weights.dist_checkpoint.folder import TorchDistFolder, in_layer_stack


@dataclass(frozen=True, kw_only=True)
class FromDist(ToHF):
    """A ``torch_dist`` folder to a HF folder."""

    @classmethod
    def plan(cls, source: Path, staging: Path, hf: Path, *, dtype: torch.dtype | None, file_bytes: int) -> FromDist:
        """Plan it, and hold the checkpoint against the config."""
        found = TorchDistFolder.open(source)
        sizes = ((each.properties.dtype, each.size.numel()) for each in found.tensors.values())
        mtp = count_mtp_layers(found.tensors)
        model = whole_model(hf, dtype=dtype or widespread(sizes), num_mtp_layers=mtp, metadata=found.spelling)
        placed = _found_places(model.placed, found)
        entries = tuple(
            stored_as(entry, found.tensors[each.chunks[0].key].properties.dtype, dtype)
            for entry, each in zip(model.entries, placed, strict=True)
        )
        model = replace(model, entries=entries, placed=placed)
        return cls(model=model, source=found.path, staging=staging, units=tuple(units_of(entries, file_bytes)))

    def parts(self, number: int) -> Iterator[tuple[HFSlice, Tensor]]:
        """What the HF tensors of a parameter have of it."""
        entry = self.model.entries[number]
        whole = self._reader.read(self.model.placed[number]).to(entry.held.dtype)
        return disassemble(entry, {0: whole}, self.device)

    @cached_property
    def _reader(self) -> TorchDistReader:
        return TorchDistReader(TorchDistFolder.open(self.source))


def _found_places(placed: Sequence[LocatedParam], found: TorchDistFolder) -> tuple[LocatedParam, ...]:
    """The places as a folder spells them.

    Raises:
        CheckpointError: naming what is missing, unexpected or of another shape.
    """
    spelled = found.spelled()
    if found.is_stacked:
        num_layers = 1 + max(layer for key in _keys(placed) if (layer := layer_of(key)) is not None)
        placed = [_map(each, lambda place: _in_stack(place, num_layers)) for each in placed]
    missing = sorted({key for key in _keys(placed) if plain_key(key) not in spelled})
    unexpected = sorted(spelled.keys() - set(map(plain_key, _keys(placed))))
    if missing or unexpected:
        raise CheckpointError(
            f"{found.path} does not fit its config: {len(missing)} tensors missing {missing[:8]}, {len(unexpected)} "
            f"unexpected {[spelled[key] for key in unexpected[:8]]}. Pass the HF config of this model by --hf"
        )
    return tuple(
        _map(each, lambda place: _checked(replace(place, key=spelled[plain_key(place.key)]), found.tensors))
        for each in placed
    )


def _keys(placed: Iterable[LocatedParam]) -> Iterator[str]:
    return (place.key for each in placed for place in each.chunks)


def _map(placed: LocatedParam, change: Callable[[ChunkLocation], ChunkLocation]) -> LocatedParam:
    return replace(placed, chunks=tuple(map(change, placed.chunks)))


def _in_stack(place: ChunkLocation, num_layers: int) -> ChunkLocation:
    """A place of a layer's own tensor, in that of all layers."""
    key, layer = in_layer_stack(place.key)
    if layer is None:
        return place
    return replace(place, key=key, shape=(num_layers, *place.shape), offset=(layer, *place.offset))


def _checked(place: ChunkLocation, tensors: Mapping[str, Any]) -> ChunkLocation:
    found = tuple(tensors[place.key].size)
    padded = place.padded and found[0] >= place.shape[0]
    if found[padded:] != place.shape[padded:]:
        raise CheckpointError(
            f"{place.key} has shape {found}, the config takes {place.shape}: is this the config of this model?"
        )
    return place
