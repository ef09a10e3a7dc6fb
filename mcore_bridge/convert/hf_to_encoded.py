"""Encodes the weights of an HF folder. Where another folder shows the format, any family works."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from mcore_bridge.config.quantization import Quantize
from mcore_bridge.convert.conversion import units_of_tensors
from mcore_bridge.convert.encoder import Encoder, Matrix
from mcore_bridge.convert.hf_to_plain import ToPlain, plain_specs_of
from mcore_bridge.errors import CheckpointError, ConfigError
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.provenance import provenance_of
from mcore_bridge.weights.source.source import Source, open_folder
from mcore_bridge.weights.source.weight_format import WeightFormat, is_linear


@dataclass(frozen=True, kw_only=True)
class ToEncoded(ToPlain):
    """The conversion to codes and scales; ``specs`` are the tensors before they are encoded."""

    encoder: Encoder

    @classmethod
    def of(
        cls, source: Path, staging: Path, quantize: Quantize, *, dtype: torch.dtype | None, file_bytes: int
    ) -> ToEncoded:
        """Plan the conversion.

        Raises:
            BridgeError: as for ``Encoder.plan``; or a description is given, and the family is not supported.
        """
        stored = open_folder(source)
        specs = plain_specs_of(stored, source, dtype)
        linear = _linear(stored, source) if isinstance(quantize, Mapping) else frozenset()
        encoder = Encoder.plan(quantize, str(source), specs, linear, dtype=dtype)
        units = units_of_tensors(specs, file_bytes)
        return cls(
            source=source,
            staging=staging,
            units=units,
            ignored=stored.unused,
            specs=specs,
            dtype=dtype,
            encoder=encoder,
        )

    @property
    def options(self) -> object:
        """See ``Conversion``."""
        return self.encoder.digest

    @property
    def numels(self) -> Sequence[int]:
        """See ``Conversion``."""
        return [numel for spec in self.specs for numel in self.encoder.numels(spec)]

    @property
    def note(self) -> str:
        """See ``Conversion``."""
        return self.encoder.note

    def finish(self) -> None:
        """Write the files of a plain folder, and the description of the format."""
        super().finish()
        self.encoder.finish(self.staging, self._all_specs())

    def _specs_in(self, number: int) -> list[TensorSpec]:
        return [written for spec in super()._specs_in(number) for written in self.encoder.specs(spec)]

    @cached_property
    def _form(self) -> WeightFormat:
        return self.encoder.form

    def _written(self, spec: TensorSpec) -> Iterator[tuple[str, int, Tensor]]:
        """Yield what is written of a tensor. Codes and scales are made of one whole matrix at a time."""
        if spec.name not in self.encoder.scheme.held:
            (plain,) = self.encoder.specs(spec)
            yield from super()._written(plain)
            return
        whole, experts = self._stored[spec.name], spec.shape[0] if len(spec.shape) > 2 else 0
        for index in range(experts) if experts else (None,):
            held = whole if index is None else whole[index]
            if isinstance(held, Tensor):
                held = self._stored.read(spec.name, held)
            matrix = Matrix(spec.name, index, experts)
            yield from self.encoder.pieces(self._form, matrix, held.to(spec.dtype), self.device)


def _linear(stored: Source, folder: Path) -> frozenset[str]:
    """The names of weights of linear layers in a folder, without parts that are not built.

    Raises:
        ConfigError: the family is not supported.
        CheckpointError: such weights have the orientation of another release of transformers.
    """
    try:
        provenance = provenance_of(folder, head=None)
    except ConfigError as error:
        raise ConfigError(
            f"{error}. Only rules of a family tell its linear layers: quantize needs the folder of a release"
        ) from None
    mapping = provenance.mapping(tied=bool(provenance.hf.tie_word_embeddings))
    view = stored.for_model(mapping)
    linear = {
        own: name
        for own, name in zip(stored, view, strict=True)
        if not mapping.is_not_built(name) and any(map(is_linear, mapping.consumers(name)))
    }
    if turned := [own for own, name in linear.items() if view.stored(name).is_transposed]:
        raise CheckpointError(
            f"quantize needs experts in the orientation of published files, found {turned[0]} transposed: convert "
            f"{folder} to torch_dist first, and that with quantize"
        )
    return frozenset(linear)
