"""Encodes the weights of an HF folder. Where another folder shows the format, any family works."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from mcore_bridge.config.quantization import Quantize
from mcore_bridge.convert.encoder import Encoder, Matrix, largest_in
from mcore_bridge.convert.hf_to_plain import ToPlain
from mcore_bridge.errors import CheckpointError, ConfigError
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.provenance import provenance_of
from mcore_bridge.weights.source.source import Source
from mcore_bridge.weights.source.weight_format import WeightFormat, is_linear


@dataclass(frozen=True, kw_only=True)
class ToEncoded(ToPlain):
    """The conversion to codes and scales; ``specs`` are the tensors before they are encoded.

    Attributes:
        plain: the conversion that makes these tensors.
    """

    plain: ToPlain
    encoder: Encoder

    @classmethod
    def of(cls, plain: ToPlain, quantize: Quantize) -> ToEncoded:
        """Plan the conversion of what ``plain`` would write.

        Raises:
            BridgeError: as for ``Encoder.plan``; or a description is given, and the family is not supported.
        """
        linear = _linear(plain.stored, plain.source) if isinstance(quantize, Mapping) else frozenset()
        encoder = Encoder.plan(quantize, str(plain.source), plain.specs, linear, dtype=plain.dtype)
        return cls(
            source=plain.source,
            staging=plain.staging,
            units=plain.units,
            ignored=plain.ignored,
            specs=plain.specs,
            dtype=plain.dtype,
            plain=plain,
            encoder=encoder,
        )

    @property
    def options(self) -> object:
        """See ``Conversion``."""
        return [self.plain.options, self.encoder.digest]

    @property
    def stored(self) -> Source:
        """The tensors of the source."""
        return self.plain.stored

    def pieces(self, spec: TensorSpec) -> Iterator[Tensor]:
        """See ``ToPlain``."""
        return self.plain.pieces(spec)

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
        experts = spec.shape[0] if len(spec.shape) > 2 else 0
        matrices = _of_size(self.pieces(spec), math.prod(spec.shape[-2:]))
        for index, numbers in enumerate(matrices):
            matrix = Matrix(spec.name, index if experts else None, experts)
            shaped = numbers.view(spec.shape[-2:])
            yield from self.encoder.pieces(self._form, matrix, shaped, self.device, self._largest)

    @cached_property
    def _largest(self) -> Callable[[str], Tensor]:
        specs = {spec.name: spec for spec in self.specs}
        return largest_in(lambda name: ((name, piece) for piece in self.pieces(specs[name])))


def _of_size(pieces: Iterable[Tensor], size: int) -> Iterator[Tensor]:
    """Join flat pieces, or cut them, into pieces of a size, of which all together have a multiple."""
    rest: list[Tensor] = []
    for piece in pieces:
        rest.append(piece)
        while (held := sum(part.numel() for part in rest)) >= size:
            joined = rest[0] if len(rest) == 1 else torch.cat(rest)
            yield joined[:size]
            rest = [joined[size:]] if held > size else []


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
