"""Writes the HF tensors of a conversion in a format: plain, or as codes and scales.

A conversion has whole matrices, which are encoded as an export encodes shards. So its bits are the bits of a save.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mcore_bridge.config.quantization import Quantize
from mcore_bridge.errors import ConfigError, plural
from mcore_bridge.rules.mapping import unstacked
from mcore_bridge.rules.scheme import Scheme
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.files.sidecars import copy_note, describe_quantization
from mcore_bridge.weights.sent.encoding import encoded_tensors, joined_with
from mcore_bridge.weights.source.weight_format import WeightFormat, weight_format


class Matrix(NamedTuple):
    """The place of a matrix in an HF tensor.

    Attributes:
        name: the plain name of the tensor.
        number: the expert in a stack of experts; None for other tensors.
        stack: the number of experts in the stack; 0 for other tensors.
    """

    name: str
    number: int | None = None
    stack: int = 0


def largest_in(read: Callable[[str], Iterable[tuple[str, Tensor]]]) -> Callable[[str], Tensor]:
    """A function from the name of a weight to its largest magnitude, [] of fp32. It reads each weight once.

    Args:
        read: yields the pieces of a weight. Other weights may come with it, so each piece has the name of its weight.
    """
    known: dict[str, Tensor] = {}

    def largest(name: str) -> Tensor:
        for own, piece in read(name) if name not in known else ():
            amax = piece.float().abs().amax()
            known[own] = torch.maximum(known.get(own, amax), amax)
        return known[name]

    return largest


@dataclass(frozen=True)
class Encoder:
    """The format of the tensors of a target. It can be pickled. By default all tensors are written as they are.

    Attributes:
        quantize: the format, as for ``save_hf_checkpoint``.
        folder: the folder whose format is "as_published".
        digest: equal for equal formats.
        scheme: the encoded weights.
        dtypes: the dtypes of tensors that are not encoded, where they are cast.
    """

    quantize: Quantize = None
    folder: str | None = None
    digest: str = ""
    scheme: Scheme = field(default_factory=Scheme)
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)

    @classmethod
    def plan(
        cls,
        quantize: Quantize,
        folder: str | None,
        specs: Sequence[TensorSpec],
        linear: Collection[str],
        *,
        dtype: torch.dtype | None,
        is_unused: Callable[[str], bool] = lambda name: False,
    ) -> Encoder:
        """The encoder for the tensors of a target.

        Args:
            specs: all tensors, before they are encoded.
            linear: the names of weights of linear layers, which a description encodes.
            dtype: as for ``convert``.
            is_unused: whether the target may lack a tensor that the folder of the format encodes.

        Raises:
            ConfigError: the format encodes nothing of the target, or its description does not fit.
            CheckpointError: the folder of the format cannot be read.
            MappingError: the folder encodes other tensors.
        """
        form = weight_format(quantize, folder)
        if not form.is_encoded:
            raise ConfigError(
                f"quantize must name a folder with quantized weights, found plain ones in {form.folder}: pass the "
                "folder of a quantized release of this model, or a quantization_config"
            )
        own = {spec.name: spec for spec in specs}
        form.require_all(own, is_unused)
        scheme = form.scheme_of_model(spec for spec in specs if spec.name in linear)
        held = {name: encoding for name, encoding in scheme.held.items() if name in own}
        if wrong := [
            f"{name} {own[name].shape}, not {encoding.shape}"
            for name, encoding in held.items()
            if own[name].shape != encoding.shape
        ]:
            raise ConfigError(
                f"quantize must name a folder of this model, found {plural(len(wrong), 'weight')} of other shapes "
                f"than in {form.folder}: {', '.join(wrong[:5])}"
            )
        dtypes = {name: form.wanted_dtype(name, spec.dtype, dtype) for name, spec in own.items() if name not in held}
        cast = {name: wanted for name, wanted in dtypes.items() if wanted != own[name].dtype}
        given = os.fspath(quantize) if isinstance(quantize, os.PathLike) else quantize
        return cls(given, folder, form.digest, Scheme(held), cast)

    def with_copies(self, copies: Mapping[str, Sequence[str]]) -> Encoder:
        """This encoder for tensors that are also written under other names: these get the same dtype."""
        cast = {other: self.dtypes[name] for name, others in copies.items() if name in self.dtypes for other in others}
        return replace(self, dtypes={**self.dtypes, **cast})

    @property
    def form(self) -> WeightFormat:
        """The open format. It is not kept, since it cannot be pickled."""
        return weight_format(self.quantize, self.folder)

    @property
    def note(self) -> str:
        """A message for users about the encoded weights; empty if there are none."""
        codecs = sorted({str(encoding.codec) for encoding in self.scheme.held.values()})
        return f"{plural(len(self.scheme.held), 'weight')} are encoded as {' and '.join(codecs)}" if codecs else ""

    def specs(self, plain: TensorSpec) -> Sequence[TensorSpec]:
        """The tensors that are written for one tensor."""
        if (encoding := self.scheme.held.get(plain.name)) is not None:
            return (*encoding.stored, *encoding.beside)
        return (replace(plain, dtype=self.dtypes.get(plain.name, plain.dtype)),)

    def numels(self, plain: TensorSpec) -> Sequence[int]:
        """The parameters in each of these tensors: codes have all of them."""
        return (plain.numel, *(0 for _ in self.specs(plain)[1:]))

    def pieces(
        self, form: WeightFormat, matrix: Matrix, tensor: Tensor, device: str, largest: Callable[[str], Tensor]
    ) -> Iterator[tuple[str, int, Tensor]]:
        """Yield what is written of a matrix: a name, the byte at which a piece starts, and the bytes on the CPU.

        Args:
            form: the open format.
            matrix: the place of the matrix.
            tensor: its numbers.
            device: where codes and scales are made.
            largest: the largest magnitude of another weight, [] of fp32.
        """
        name = matrix.name if matrix.number is None else f"{matrix.name}[{matrix.number}]"
        numbers = tensor.to(device) if matrix.name in self.scheme.held else tensor
        joined = {other: largest(other).to(device) for other in joined_with(name, self.scheme)}
        for numbered, made in encoded_tensors(name, numbers, self.scheme, form, stack=matrix.stack, joined=joined):
            written, index = unstacked(numbered)
            flat = made.to("cpu", self.dtypes.get(written, made.dtype)).contiguous().flatten().view(torch.uint8)
            yield written, (index or 0) * flat.nbytes, flat

    def finish(self, target: Path, written: Collection[TensorSpec]) -> None:
        """Describe the format in the config of the target."""
        form = self.form
        if fields := form.config_fields(written):
            describe_quantization(target, fields)
        if form.folder is not None:
            copy_note(Path(form.folder), target)
