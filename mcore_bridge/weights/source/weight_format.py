"""The format in which weights leave a model: plain, as the folder of the model has them, or by a description.

Each rank opens it for itself. What it decides depends on the files alone, so ranks compare a digest.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_bridge.arguments import instance_of, require
from mcore_bridge.config.hf import find_folder
from mcore_bridge.config.quantization import DESCRIPTION, Quantization, Quantize
from mcore_bridge.errors import ConfigError, MappingError
from mcore_bridge.rules.dtypes import Dtypes, wanted_dtype
from mcore_bridge.rules.encoded import Encoded
from mcore_bridge.rules.mapping import WeightMapping
from mcore_bridge.rules.names import TOWER
from mcore_bridge.rules.scheme import Scheme, is_part, stem_of
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.files.sources import SourceFolders
from mcore_bridge.weights.plan.encoded_entries import encoded_entries, plain_specs
from mcore_bridge.weights.plan.inventory import ParamEntry
from mcore_bridge.weights.source.encoded_weights import description_of
from mcore_bridge.weights.source.new_scheme import (
    new_scheme,
    read_description,
    require_some,
    warn_of_misspelt,
    written_description,
)
from mcore_bridge.weights.source.source import Source, open_folder

AS_PUBLISHED = "as_published"
_KIND = instance_of(
    'None, "as_published", a folder or its hub name, or a quantization_config as a dict',
    *(type(None), str, os.PathLike, Mapping),
    advice="pass one of them",
)


@dataclass(frozen=True)
class WeightFormat:
    """A format of weights. Without a folder and a description, weights are plain.

    Attributes:
        description: the fields of an HF config that describe the format; none for plain weights.
        source, folder: the tensors of the folder that shows the format, and its path.
        digest: equal for equal formats, in every process.
    """

    description: Mapping[str, Any] = field(default_factory=dict)
    source: Source | None = None
    folder: str | None = None
    digest: str = ""
    quantization: Quantization | None = field(default=None, repr=False)

    def entries(self, mapping: WeightMapping, entries: Sequence[ParamEntry]) -> tuple[ParamEntry, ...]:
        """The entries of an export in this format.

        Raises:
            MappingError: the model has other tensors than the folder that shows the format, or is cut so that codes
                cannot follow; the message names them.
            ConfigError: the description does not fit the weights.
        """
        specs = plain_specs(entries)
        self.require_all(specs, mapping.is_unused)
        if self.quantization is not None:
            warn_of_misspelt(self.quantization.left_out, specs)
        linear = [entry for entry in entries if is_linear(entry.held.name)]
        return encoded_entries(entries, self.scheme_of_model(plain_specs(linear).values()))

    def require_all(self, known: Collection[str], is_unused: Callable[[str], bool] = lambda name: False) -> None:
        """Require that all weights that the folder encodes are among ``known``, the plain names of an export.

        Raises:
            MappingError: weights are missing for which ``is_unused`` is false; the message names one.
        """
        if lost := [name for name in self.files if name not in known and not is_unused(name)]:
            raise MappingError(
                f"{self.folder} encodes {len(lost)} tensors that this export does not have, such as {lost[0]}: "
                "expected a folder of this model with equal names",
                in_python="leave expert_format= at its default",
            )

    def scheme_of_model(self, weights: Iterable[TensorSpec]) -> Scheme:
        """The scheme of a whole model with these plain weights of linear layers.

        Raises:
            ConfigError: the description does not fit the weights, or encodes none of them.
        """
        scheme = self.scheme_for(weights)
        if self.quantization is not None:
            require_some(scheme, self.quantization)
        return scheme

    def scheme_for(self, weights: Iterable[TensorSpec]) -> Scheme:
        """The scheme of some plain weights of linear layers.

        Raises:
            ConfigError: the description does not fit the weights.
        """
        if self.source is not None:
            return self.source.scheme
        return Scheme() if self.quantization is None else new_scheme(weights, self.quantization)

    def raw(self, name: str) -> Tensor | None:
        """A tensor as the folder stores it, under its name there; None without a folder."""
        return None if self.source is None else self.source.raw(name)

    @property
    def is_encoded(self) -> bool:
        """Whether any weight leaves encoded."""
        return self.quantization is not None or (self.source is not None and self.source.is_encoded)

    @cached_property
    def files(self) -> Mapping[str, Encoded]:
        """The encoded weights of the folder, whose scales are kept where they fit."""
        return _EncodedOnly(self.source) if self.source is not None else {}

    def wanted_dtype(self, name: str, own: torch.dtype, dtypes: Dtypes) -> torch.dtype:
        """The dtype in which a tensor leaves: as ``dtypes`` say, else as the folder has it. Codes and scales stay."""
        if dtypes is None and self.source is None:
            return own
        is_plain = self.source is not None and name in self.source and name not in self.source.scheme.held
        if self is not PLAIN and not is_plain and is_part(TensorSpec(name, (), own)):
            return own
        if dtypes is None and self.source is not None and is_plain:
            dtypes = self.source[name].dtype
        return wanted_dtype(name, own, dtypes)

    def config_fields(self, written: Collection[TensorSpec]) -> dict[str, Any]:
        """The fields of the HF config of a folder with these tensors; they name all modules that are not encoded."""
        if self.quantization is None:
            return dict(self.description)
        ((kind, _),) = self.quantization.allowed
        (name,) = self.description
        return {name: written_description(self.description[name], kind, _plain_modules(written))}


PLAIN = WeightFormat()


class _EncodedOnly(Mapping[str, Encoded]):
    """The encoded weights of a source."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __getitem__(self, name: str) -> Encoded:
        weight = self._source[name]
        if not isinstance(weight, Encoded):
            raise KeyError(name)
        return weight

    def __contains__(self, name: object) -> bool:
        return name in self._source.scheme.held

    def __iter__(self) -> Iterator[str]:
        return iter(self._source.scheme.held)

    def __len__(self) -> int:
        return len(self._source.scheme.held)


def _plain_modules(written: Collection[TensorSpec]) -> Iterator[str]:
    """Yield the modules of tensors that are not encoded: linear layers, embeddings, and stacks of experts."""
    encoded = {stem_of(spec.name) for spec in written if is_part(spec)}
    above = {name.rpartition(".")[0] for name in encoded}
    for spec in written:
        if spec.dtype not in (torch.bfloat16, torch.float16, torch.float32) or is_part(spec):
            continue
        module, _, tensor = spec.name.rpartition(".")
        if tensor == "weight" and len(spec.shape) > 1 and module not in encoded:
            yield module
        elif module.endswith(".experts") and len(spec.shape) > 2:
            yield spec.name if module in above else module


def is_linear(mcore: str) -> bool:
    """Whether a canonical name is of the weight of a linear layer that engines can run in low precision.

    Embedding, head, norms, routers, the mixers of linear attention and Mamba, and towers are not.
    """
    *_, module, tensor = mcore.split(".")
    is_named = tensor == "weight" and module.startswith("linear_") and module != "linear_weights_proj"
    return is_named and not mcore.startswith(TOWER)


def plain_dtype(specs: Iterable[TensorSpec]) -> torch.dtype:
    """The dtype of the largest tensor that is no part of an encoded weight."""
    return max((spec for spec in specs if not is_part(spec)), key=lambda spec: spec.num_bytes).dtype


def weight_format(quantize: Quantize, folder: str | None) -> WeightFormat:
    """Open the format that ``quantize`` asks for.

    Args:
        folder: the folder that the model came from; None if it is not known.

    Raises:
        ConfigError: ``quantize`` has another type, describes a format that is not supported, or the folder is unknown.
        CheckpointError: the folder cannot be read, or its weights cannot be decoded.
    """
    require(ConfigError, quantize=(quantize, _KIND))
    if quantize is None:
        return PLAIN
    if isinstance(quantize, Mapping):
        quantization = read_description(quantize)
        text = json.dumps(quantize, sort_keys=True, default=str)
        description = {DESCRIPTION[0]: quantize}
        return WeightFormat(description, digest=hashlib.sha256(text.encode()).hexdigest(), quantization=quantization)
    if quantize == AS_PUBLISHED:
        if folder is None:
            raise ConfigError(
                'quantize="as_published" needs the folder that the model came from, and this model has none: build or '
                "load it from a folder, or pass the folder of a release as quantize="
            )
        return _of_folder(folder)
    return _of_folder(os.fspath(find_folder(quantize)))


def _of_folder(folder: str) -> WeightFormat:
    return _opened(folder, json.dumps(SourceFolders.of(folder).as_json()))


@lru_cache(maxsize=2)  # an entry keeps the files of its folder open, also if a save has replaced them
def _opened(folder: str, state: str) -> WeightFormat:
    """The format of a folder. Opened again only if its files have changed."""
    source, description = open_folder(folder), description_of(Path(folder))
    stored = [
        (name, str((held.codec, held.powers, held.order)), *map(str, held.stored))
        for name, held in source.scheme.held.items()
    ]
    described = json.dumps(description, sort_keys=True, default=str)
    digest = hashlib.sha256(f"{sorted(stored)} {described}".encode()).hexdigest()
    return WeightFormat(description, source, folder, digest)
