"""Decodes the encoded weights of an HF folder to plain tensors. No model is built, so any family works."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_bridge.config.hf import read_fields, write_fields
from mcore_bridge.convert.conversion import Conversion, Progress, decoded_dtype, units_of_tensors
from mcore_bridge.errors import CheckpointError
from mcore_bridge.rules.dtypes import dtype_name, has_overflown, wanted_dtype, warn_of_overflow
from mcore_bridge.rules.encoded import Encoded
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.files.file_shards import shard_names_of
from mcore_bridge.weights.files.hf_folder import HEADS, weight_files, write_index
from mcore_bridge.weights.files.safetensors import SafetensorsWriter
from mcore_bridge.weights.files.sidecars import copy_companions, forget_quantization
from mcore_bridge.weights.source.source import Source, open_folder
from mcore_bridge.weights.source.weight_format import plain_dtype

_CONFIG = "config.json"
_OTHERS = ("*.json", "LICENSE*", "*.md")
PIECE_ELEMENTS = 1 << 21


@dataclass(frozen=True, kw_only=True)
class ToPlain(Conversion):
    """The conversion to plain tensors; ``specs`` are these tensors, and ``units`` have their indices."""

    kind = "hf"
    heads = HEADS
    specs: tuple[TensorSpec, ...]
    dtype: torch.dtype | None

    @classmethod
    def plan(cls, source: Path, staging: Path, *, dtype: torch.dtype | None, file_bytes: int) -> ToPlain:
        """Plan the conversion.

        Raises:
            CheckpointError: the folder has no encoded weights, or has weights that cannot be decoded.
        """
        if not open_folder(source).is_encoded:
            raise CheckpointError(
                f"{source} has no quantized weights, expected some: it is already a folder of plain tensors"
            )
        return cls.of_any(source, staging, dtype=dtype, file_bytes=file_bytes)

    @classmethod
    def of_any(cls, source: Path, staging: Path, *, dtype: torch.dtype | None, file_bytes: int) -> ToPlain:
        """Plan the conversion of a folder that may have plain weights."""
        stored = open_folder(source)
        specs = plain_specs_of(stored, source, dtype)
        units = units_of_tensors(specs, file_bytes)
        return cls(source=source, staging=staging, units=units, ignored=stored.unused, specs=specs, dtype=dtype)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the files, as transformers numbers them."""
        return shard_names_of(len(self.units))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of the tensors in each file."""
        return tuple(sum(spec.num_bytes for spec in self._specs_in(number)) for number in range(len(self.units)))

    @property
    def contents(self) -> Iterable[object]:
        """See ``Conversion``."""
        return self.specs

    @property
    def numels(self) -> Sequence[int]:
        """See ``Conversion``."""
        return [spec.numel for spec in self.specs]

    def write(self, number: int, progress: Progress) -> None:
        """Write one file, one tensor after the other, and each in pieces."""
        with self.completing(number) as path, SafetensorsWriter(path, self._specs_in(number)) as writer:
            for spec in (self.specs[tensor] for tensor in self.units[number]):
                for name, start, piece in self._written(spec):
                    writer.write(name, start, piece)
                    progress(piece.nbytes)
                self.stored.release(spec.name)

    def replaced(self, target: Path) -> Iterable[str]:
        """The names of the files of a checkpoint of this kind in ``target``."""
        return weight_files(target)

    def finish(self) -> None:
        """Write the index, the config without its description of quantization, and the other files of the folder."""
        copy_companions(self.source, self.staging, *_OTHERS)
        forget_quantization(self.staging)
        fields = _fields(self.staging)
        dtype = dtype_name(plain_dtype(self._all_specs()))
        if "dtype" not in fields:
            fields["torch_dtype"] = dtype  # all releases of transformers read this spelling
        for part in (fields, *(value for value in fields.values() if isinstance(value, dict))):
            part |= {name: dtype for name in ("dtype", "torch_dtype") if name in part}
        write_fields(self.staging / _CONFIG, fields)
        write_index(self.staging, {name: self._specs_in(number) for number, name in enumerate(self.names)})

    def _specs_in(self, number: int) -> list[TensorSpec]:
        return [self.specs[tensor] for tensor in self.units[number]]

    def _all_specs(self) -> list[TensorSpec]:
        return [spec for number in range(len(self.units)) for spec in self._specs_in(number)]

    def _written(self, spec: TensorSpec) -> Iterator[tuple[str, int, Tensor]]:
        """Yield what is written of a tensor: a name, the byte at which a piece starts, and the piece, flat."""
        start = 0
        for piece in self.pieces(spec):
            yield spec.name, start, piece
            start += piece.nbytes

    @cached_property
    def stored(self) -> Source:
        """The tensors of the source."""
        return open_folder(self.source)

    def pieces(self, spec: TensorSpec) -> Iterator[Tensor]:
        """Yield the elements of a tensor in order, some at a time, flat and on the CPU."""
        overflown = False
        for piece, is_cast in self._cast(spec):
            overflown = overflown or (is_cast and has_overflown(piece))
            yield piece
        warn_of_overflow([spec.name] * overflown)

    def _cast(self, spec: TensorSpec) -> Iterator[tuple[Tensor, bool]]:
        """Yield the pieces, each with whether a cast may have changed its numbers."""
        tensor = self.stored[spec.name]
        if isinstance(tensor, Encoded):
            for rows in tensor.in_order(PIECE_ELEMENTS):
                yield rows.to(spec.dtype, self.device).cpu().flatten(), True
            return
        for view in tensor.flatten().split(PIECE_ELEMENTS):
            yield self.stored.read(spec.name, view).to(spec.dtype), tensor.dtype != spec.dtype


def plain_specs_of(stored: Source, folder: Path, dtype: torch.dtype | None) -> tuple[TensorSpec, ...]:
    """The tensors of a folder after decoding, in ``dtype`` or in the dtype of the config."""
    decoded = dtype or decoded_dtype(folder)
    return tuple(
        TensorSpec(name, tuple(t.shape), decoded if isinstance(t, Encoded) else wanted_dtype(name, t.dtype, dtype))
        for name, t in stored.items()
    )


def _fields(folder: Path) -> dict[str, Any]:
    fields: dict[str, Any] = read_fields(folder / _CONFIG)
    return fields
