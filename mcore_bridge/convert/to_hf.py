"""The base class of conversions to an HF folder."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from mcore_bridge.config.quantization import Quantize
from mcore_bridge.convert.assemble import HFSlice, parts_of, specs_of
from mcore_bridge.convert.conversion import ModelConversion, Progress
from mcore_bridge.convert.encoder import Encoder, Matrix, largest_in
from mcore_bridge.errors import CheckpointError
from mcore_bridge.rules.dtypes import dtype_name, is_exact
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.files.file_shards import MAX_SHARD_BYTES, assign_files, shard_names_of
from mcore_bridge.weights.files.hf_folder import HEADS, weight_files, write_index
from mcore_bridge.weights.files.safetensors import SafetensorsWriter
from mcore_bridge.weights.not_built import Mtp, NotBuilt, not_built_of
from mcore_bridge.weights.plan.inventory import ParamEntry
from mcore_bridge.weights.source.weight_format import is_linear, plain_dtype


@dataclass(frozen=True, kw_only=True)
class ToHF(ModelConversion):
    """A conversion of a checkpoint of megatron-core to an HF folder."""

    kind = "hf"
    heads = HEADS
    mtp: Mtp = "copied"
    encoder: Encoder = field(default_factory=Encoder)

    def encoded(self, quantize: Quantize, dtype: torch.dtype | None) -> Self:
        """This conversion with weights in a format.

        Args:
            quantize: as for ``save_hf_checkpoint``.
            dtype: the dtype of tensors that are not encoded. None: as the folder of the format has them.

        Raises:
            BridgeError: as for ``Encoder.plan``.
        """
        entries, folder = self.model.entries, self.model.provenance.folder
        linear = {part.name for entry in entries if is_linear(entry.held.name) for part in parts_of(entry)}
        is_unused = self.model.mapping.is_unused
        encoder = Encoder.plan(quantize, folder, [*specs_of(entries)], linear, dtype=dtype, is_unused=is_unused)
        done = replace(self, encoder=encoder)
        return replace(done, encoder=encoder.with_copies(done.not_built.repeated))

    @property
    def options(self) -> object:
        """See ``Conversion``."""
        return [self.mtp, self.encoder.digest]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the files, numbered as in transformers."""
        return shard_names_of(len(self.units) + len(self.copied_units))

    @cached_property
    def not_built(self) -> NotBuilt:
        """The tensors of parts that are not built, which come from the folder of the HF config."""
        form = self.encoder.form
        return not_built_of(self.model.provenance, self.model.mapping, mtp=self.mtp, form=form)

    @cached_property
    def written(self) -> tuple[ParamEntry, ...]:
        """The parameters, with all HF names under which they are written."""
        more = self.not_built.repeated
        return tuple(
            replace(entry, copies=(*entry.copies, *more[entry.hf[0]])) if entry.hf[0] in more else entry
            for entry in self.model.entries
        )

    @property
    def copied_names(self) -> tuple[str, ...]:
        """See ``Conversion``."""
        return tuple(spec.name for spec in self.not_built.specs)

    @property
    def note(self) -> str:
        """See ``Conversion``."""
        return ". ".join(filter(None, (self.encoder.note, self.not_built.note)))

    @property
    def hf_names(self) -> Collection[str]:
        """See ``ModelConversion``."""
        return [spec.name for spec in self._all_specs()]

    @property
    def dtype(self) -> torch.dtype:
        """See ``ModelConversion``."""
        return plain_dtype(self._all_specs())

    @property
    def numels(self) -> Sequence[int]:
        """See ``Conversion``. The tensors are HF's, copied ones included."""
        own = chain.from_iterable(map(self.encoder.numels, specs_of(self.written)))
        return [*own, *(spec.numel for spec in self.not_built.specs)]

    def _all_specs(self) -> Iterator[TensorSpec]:
        return chain.from_iterable(map(self._specs, range(len(self.names))))

    @cached_property
    def copied_units(self) -> tuple[tuple[TensorSpec, ...], ...]:
        """The copied tensors of each file. These files follow the files of parameters, and are at most as large."""
        limit = max((*super().sizes, MAX_SHARD_BYTES))
        return tuple(shard.tensors for shard in assign_files(self.not_built.specs, 1, limit))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of the tensors in each file."""
        return tuple(sum(spec.num_bytes for spec in self._specs(number)) for number in range(len(self.names)))

    def write(self, number: int, progress: Progress) -> None:
        """Write one file, one parameter after the other."""
        form = self.encoder.form
        with self.completing(number) as path, SafetensorsWriter(path, self._specs(number)) as writer:
            for name, tensor in self.not_built.pairs(spec.name for spec in self._copied_in(number)):
                writer.write(name, 0, tensor.contiguous().flatten().view(torch.uint8))
                progress(tensor.nbytes)
            for param in self.units[number] if number < len(self.units) else ():
                entry = self.written[param]
                for part, tensor in self.parts(param):
                    for name in (part.name, *(entry.copies if part == parts_of(entry)[0] else ())):
                        matrix = Matrix(name, part.index, entry.stack)
                        pieces = self.encoder.pieces(form, matrix, tensor, self.device, self._largest)
                        for written, start, flat in pieces:
                            writer.write(written, start, flat)
                            progress(flat.nbytes)

    @cached_property
    def _largest(self) -> Callable[[str], Tensor]:
        params = {part.name: number for number, entry in enumerate(self.model.entries) for part in parts_of(entry)}
        return largest_in(lambda name: ((part.name, tensor) for part, tensor in self.parts(params[name])))

    def parts(self, number: int) -> Iterator[tuple[HFSlice, Tensor]]:
        """Yield the parts of a parameter that belong to its HF tensors."""
        raise NotImplementedError

    def replaced(self, target: Path) -> Iterable[str]:
        """The names of the files of a checkpoint of this kind in ``target``."""
        return weight_files(target)

    def finish(self) -> None:
        """Write the index, the HF config and the tokenizer."""
        super().finish()
        self.encoder.finish(self.staging, [*self._all_specs()])
        write_index(self.staging, {name: self._specs(number) for number, name in enumerate(self.names)})

    def _specs(self, number: int) -> list[TensorSpec]:
        units = self.units[number] if number < len(self.units) else ()
        plain = specs_of(self.written[param] for param in units)
        return [*chain.from_iterable(map(self.encoder.specs, plain)), *self._copied_in(number)]

    def _copied_in(self, number: int) -> tuple[TensorSpec, ...]:
        return self.copied_units[number - len(self.units)] if number >= len(self.units) else ()


def stored_as(entry: ParamEntry, stored: torch.dtype, dtype: torch.dtype | None) -> ParamEntry:
    """The entry with the dtype of the stored tensor; if the caller asks for a ``dtype``, the entry is unchanged.

    Raises:
        CheckpointError: a model cannot hold all values of the stored tensor, and the caller requests another dtype.
    """
    own = entry.held.dtype
    if dtype is None:
        return replace(entry, held=replace(entry.held, dtype=stored))
    if not is_exact(stored, own) and own != dtype:
        raise CheckpointError(
            f"{entry.held.name} is {dtype_name(stored)}, and {dtype_name(own)} in a model, which cannot hold all its "
            "values; leave out --dtype to keep the dtype of every tensor"
        )
    return entry
