"""A checkpoint of megatron-core to a HF folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_bridge.commands.conversion import Conversion, units_of, widespread
from mcore_bridge.commands.whole import whole_model
from mcore_bridge.errors import CheckpointError
from mcore_bridge.weights.checkpoint import write_index
from mcore_bridge.weights.dtypes import dtype_name, is_exact
from mcore_bridge.weights.entries import Entry
from mcore_bridge.weights.manifest import TensorSpec
from mcore_bridge.weights.names import layer_of, mtp_layer_of, plain_key
from mcore_bridge.weights.safetensors_file import SafetensorsWriter
from mcore_bridge.weights.torch_dist import TorchDistFolder, in_layer_stack
from mcore_bridge.weights.torch_dist_files import Place, Placed, TorchDistReader
from mcore_bridge.weights.whole import Part, parts_of, specs_of, take_apart


@dataclass(frozen=True)
class ToHF(Conversion):
    """A checkpoint of megatron-core to a HF folder."""

    kind = "hf"
    dropped = ("*.safetensors", "*.safetensors.index.json")

    @classmethod
    def plan(cls, source: Path, staging: Path, hf: Path, *, dtype: torch.dtype | None, file_bytes: int) -> ToHF:
        """Plan it, and hold the checkpoint against the config."""
        found = TorchDistFolder.open(source)
        sizes = ((each.properties.dtype, each.size.numel()) for each in found.tensors.values())
        mtp = {mtp_layer_of(key) for key in found.tensors} - {None}
        metadata = {**found.spelling, "non_homogeneous_layers": True}
        model = whole_model(hf, dtype=dtype or widespread(sizes), num_mtp_layers=len(mtp), metadata=metadata)
        placed = _found_places(model.placed, found)
        entries = tuple(
            _stored(entry, found.tensors[each.places[0].key].properties.dtype, dtype)
            for entry, each in zip(model.entries, placed, strict=True)
        )
        model = replace(model, entries=entries, placed=placed)
        return cls(model, found.path, staging, tuple(units_of(entries, file_bytes)))

    @property
    def names(self) -> tuple[str, ...]:
        """As transformers numbers them."""
        count = len(self.units)
        return tuple(f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1))

    def write(self, number: int) -> None:
        """Write one file, one parameter after the other."""
        path = self.staging / f"{number}.partial"
        path.unlink(missing_ok=True)
        described = [(spec.name, spec.shape, spec.dtype) for spec in self._specs(number)]
        with SafetensorsWriter(path, described) as writer:
            for each in self.units[number]:
                entry = self.model.entries[each]
                whole = self._reader.read(self.model.placed[each]).to(entry.held.dtype)
                for part, tensor in take_apart(entry, whole):
                    _write(writer, entry, part, tensor)
        with path.open("rb") as file:
            os.fsync(file.fileno())  # or the name might outlive what it stands for
        path.rename(self.staging / self.names[number])

    def finish(self) -> None:
        """Write the index, the HF config and the tokenizer."""
        super().finish()
        write_index(self.staging, {name: self._specs(number) for number, name in enumerate(self.names)})

    @cached_property
    def _reader(self) -> TorchDistReader:
        return TorchDistReader(TorchDistFolder.open(self.source))

    def _specs(self, number: int) -> list[TensorSpec]:
        return list(specs_of(self.model.entries[each] for each in self.units[number]))


def _write(writer: SafetensorsWriter, entry: Entry, part: Part, tensor: Tensor) -> None:
    flat = tensor.flatten().view(torch.uint8)
    writer.write(part.name, (part.index or 0) * flat.nbytes, flat)
    if part == parts_of(entry)[0]:
        for name in entry.copies:
            writer.write(name, 0, flat)


def _stored(entry: Entry, stored: torch.dtype, dtype: torch.dtype | None) -> Entry:
    """An entry in the dtype that it is stored in, or in its own where a dtype was asked for."""
    own = entry.held.dtype
    if dtype is None:
        return replace(entry, held=replace(entry.held, dtype=stored))
    if not is_exact(stored, own) and own != dtype:
        raise CheckpointError(
            f"{entry.held.mcore} is {dtype_name(stored)}, and {dtype_name(own)} in a model, which cannot hold all its "
            "values; leave out --dtype to keep every tensor in its own"
        )
    return entry


def _found_places(placed: Sequence[Placed], found: TorchDistFolder) -> tuple[Placed, ...]:
    """The places as a folder spells them.

    Raises:
        CheckpointError: naming what is missing, unexpected or of another shape.
    """
    spelled = found.spelled()
    if not found.spelling["non_homogeneous_layers"]:
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


def _keys(placed: Iterable[Placed]) -> Iterator[str]:
    return (place.key for each in placed for place in each.places)


def _map(placed: Placed, change: Callable[[Place], Place]) -> Placed:
    return replace(placed, places=tuple(map(change, placed.places)))


def _in_stack(place: Place, num_layers: int) -> Place:
    """A place of a layer's own tensor, in that of all layers."""
    key, layer = in_layer_stack(place.key)
    if layer is None:
        return place
    return replace(place, key=key, shape=(num_layers, *place.shape), offset=(layer, *place.offset))


def _checked(place: Place, tensors: Mapping[str, Any]) -> Place:
    found = tuple(tensors[place.key].size)
    padded = place.padded and found[0] >= place.shape[0]
    if found[padded:] != place.shape[padded:]:
        raise CheckpointError(
            f"{place.key} has shape {found}, the config takes {place.shape}: is this the config of this model?"
        )
    return place
