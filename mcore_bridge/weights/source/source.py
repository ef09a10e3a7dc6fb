"""Opens HF weights from a folder, a mapping or pairs, as tensors with plain names.

A table has, for each plain name, how the source stores the tensor. It is made before a weight is read, and nothing is
renamed in place: another view of a source is another table. Pairs come one after the other. Tensors that belong
together, such as codes and scales, wait for each other.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Self, TypeAlias, Union

import torch
from torch import Tensor

from mcore_bridge.config.hf import find_folder
from mcore_bridge.config.quantization import Quantization, read_quantization
from mcore_bridge.errors import CheckpointError, shown
from mcore_bridge.rules.encoded import Weight
from mcore_bridge.rules.mapping import WeightMapping, pattern_of
from mcore_bridge.rules.scheme import Encoding, Scheme, is_part, is_unused, stem_of
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.rules.variants import model_names, prefix_in, stacks_of, transposed_in
from mcore_bridge.weights.files.hf_folder import Checkpoint
from mcore_bridge.weights.files.positional_io import array_of
from mcore_bridge.weights.files.safetensors import SafetensorsFile
from mcore_bridge.weights.source.encoded_weights import encoded, scheme_in, scheme_within, specs_of


class Pairs(Iterable[tuple[str, Weight]]):
    """Pairs of HF names and tensors.

    The parts of an encoded weight are kept until all have arrived. This also holds for the two stacks of experts of a
    layer.

    Attributes:
        unused: after the last pair, the names of tensors that no weight needs, such as scales of activations.
    """

    def __init__(self, pairs: Iterable[tuple[str, Tensor]], quantization: Quantization | None) -> None:
        self._pairs = pairs
        self._quantization = quantization
        self.unused: list[str] = []

    def for_model(self, mapping: WeightMapping) -> Iterator[tuple[str, Weight]]:
        """Yield plain names and tensors, by the names, and in the orientation, of a model's rules.

        Raises:
            CheckpointError: an item is no pair, or a tensor comes twice. At the end: parts of encoded weights are
                incomplete; the message names them.
        """
        prefix, stacks = prefix_in(mapping), stacks_of(mapping)
        layers: dict[str, dict[str, Tensor]] = {}
        for stored, tensor in self:
            is_headless = prefix and not mapping.consumers(stored) and mapping.consumers(f"{prefix}{stored}")
            name = f"{prefix}{stored}" if is_headless else stored
            if not stacks or pattern_of(name) not in stacks or not isinstance(tensor, Tensor):
                yield name, tensor
                continue
            layer = layers.setdefault(name.rpartition(".")[0], {})
            if name in layer:
                raise _twice(name)
            layer[name] = tensor
            if len(layer) == 2:
                del layers[name.rpartition(".")[0]]
                transposed = transposed_in(layer, stacks)
                yield from ((own, stack.mT if own in transposed else stack) for own, stack in layer.items())
        for layer in layers.values():
            yield from layer.items()

    def __iter__(self) -> Iterator[tuple[str, Weight]]:
        """The plain names and tensors."""
        waiting: dict[str, dict[str, Tensor]] = {}  # parts by the common prefix of their names
        done: set[str] = set()
        for name, tensor in self._checked():
            if not isinstance(tensor, Tensor) or not is_part(TensorSpec.of(name, tensor)):
                yield name, tensor
                continue
            group = waiting.setdefault(stem_of(name), {})
            if name in group or name in done:
                raise _twice(name)
            group[name] = tensor
            for plain, held in self._complete(group):
                yield plain, encoded(plain, held, group)
                done.update(held.names)
                for part in held.names:
                    del group[part]
        left = {name: tensor for group in waiting.values() for name, tensor in group.items()}
        scheme = scheme_within(specs_of(left), self._quantization)
        self.unused += scheme.unused
        for name in scheme.plain(left):
            if name in scheme.held:
                yield name, encoded(name, scheme.held[name], left)
            elif done and is_unused(name):
                self.unused.append(name)
            else:
                yield name, left[name]

    def _checked(self) -> Iterator[tuple[str, Tensor]]:
        for pair in self._pairs:
            if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
                raise CheckpointError(
                    f"the source must yield pairs of an HF name and a tensor, found {shown(pair)}: pass such pairs"
                )
            yield pair

    def _complete(self, group: Mapping[str, Tensor]) -> list[tuple[str, Encoding]]:
        """The encoded weight of ``group``; None until all parts have come. The stored shape of int4 is a part, too."""
        try:
            held = scheme_within(specs_of(group), self._quantization).held
        except CheckpointError:  # incomplete, or wrong, which raises at the end
            return []
        return [(name, weight) for name, weight in held.items() if weight.codec.kind != "int4" or weight.shape_tensor]


def _twice(name: str) -> CheckpointError:
    return CheckpointError(f"{name} came twice; every HF tensor must come exactly once")


class Stored(NamedTuple):
    """How a source stores one plain tensor.

    Attributes:
        names: its name in the source or, if it is encoded, the names of its parts.
        encoding: the codec and the shapes of an encoded weight; None for a plain tensor.
        is_transposed: whether the last two dims are stored in the reverse order of the model's rules.
    """

    names: tuple[str, ...]
    encoding: Encoding | None = None
    is_transposed: bool = False


class Source(Mapping[str, Weight]):
    """HF tensors by their plain names. Encoded ones are ``Encoded``.

    Args:
        tensors: all that is stored.
        scheme: the encoding of each encoded tensor.
    """

    def __init__(self, tensors: Mapping[str, Tensor], scheme: Scheme | None = None) -> None:
        self.scheme = scheme = scheme or Scheme()
        """Which tensors are encoded, by plain name in the source."""
        self._tensors = tensors
        plain = {name: Stored((name,)) for name in scheme.plain(tensors)}
        self._table = plain | {name: Stored(held.parts, held) for name, held in scheme.held.items()}
        self.unused = scheme.unused
        """The names of tensors that no weight needs, such as scales of activations."""
        self.folder = tensors.folder if isinstance(tensors, Checkpoint) else None
        self._files = tensors.files if isinstance(tensors, Checkpoint) else {}

    def for_model(self, mapping: WeightMapping) -> Self:
        """A view of this source with the names and the orientation of a model's rules."""
        new, names = copy.copy(self), model_names(self, mapping)
        if names:
            new._table = {names.get(name, name): stored for name, stored in self._table.items()}
        transposed = transposed_in(new, stacks_of(mapping))
        new._table = new._table | {name: new._table[name]._replace(is_transposed=True) for name in transposed}
        return new

    def __getitem__(self, name: str) -> Weight:
        names, encoding, is_transposed = self._table[name]
        if encoding is not None:
            return encoded(name, encoding, self._tensors)
        tensor = self._tensors[names[0]]
        return tensor.mT if is_transposed else tensor

    def __contains__(self, name: object) -> bool:
        return name in self._table

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)

    def stored(self, name: str) -> Stored:
        """How the source stores a tensor."""
        return self._table[name]

    def described(self, name: str) -> Weight | Encoding:
        """Shape and dtype of a tensor, for a check. Most encoded tensors are not opened for it."""
        encoding = self._table[name].encoding
        return self[name] if encoding is None or encoding.shape_tensor is not None else encoding

    @property
    def is_encoded(self) -> bool:
        """Whether any weight is encoded."""
        return any(stored.encoding for stored in self._table.values())

    def raw(self, name: str) -> Tensor:
        """A tensor as it is stored, under its name there. It may be a part of an encoded weight."""
        return self._tensors[name]

    def raw_specs(self, name: str) -> tuple[TensorSpec, ...]:
        """The tensors that the source has for a plain name, as it stores them."""
        encoding = self._table[name].encoding
        return (TensorSpec.of(name, self[name]),) if encoding is None else (*encoding.stored, *encoding.beside)

    def files(self, name: str) -> tuple[SafetensorsFile, ...]:
        """The file of a tensor or, if it is encoded, the file of each part; empty if the source has no files."""
        return tuple(map(self._files.__getitem__, self._table[name].names)) if self._files else ()

    def read(self, name: str, part: Tensor) -> Tensor:
        """A part of a plain tensor. If the tensor is in a file, it is read by position, into new memory.

        A memory map is not used here: if the file becomes shorter, access to the missing part would kill the process.
        """
        if not (files := self.files(name)):
            return part
        held = torch.empty(part.shape, dtype=part.dtype)
        files[0].read([part], array_of(held))
        return held

    def release(self, name: str) -> None:
        """Free the memory of pages that were read for ``name``; they stay in the page cache."""
        for own in self._table[name].names if self._files else ():
            self._files[own].release(own)

    def require_unchanged(self) -> None:
        """Raise ``CheckpointError`` if a file was changed after it was opened."""
        if isinstance(self._tensors, Checkpoint):
            self._tensors.require_unchanged()

    def pairs(self, names: Iterable[str]) -> Iterator[tuple[str, Weight]]:
        """Yield ``(name, tensor)`` for each of ``names``. Each step frees the memory of the tensor before."""
        for name in names:
            yield name, self[name]
            self.release(name)


def open_folder(folder: str | os.PathLike[str], mapping: WeightMapping | None = None) -> Source:
    """The tensors of a folder: with the names of ``mapping``, else with the names in the folder.

    Raises:
        CheckpointError: the folder cannot be read; or encoded weights cannot be decoded, or differ from the config.
        ConfigError: the config names a format that is not supported.
    """
    checkpoint = Checkpoint(folder)
    source = Source(checkpoint, scheme_in(checkpoint))
    return source if mapping is None else source.for_model(mapping)


HFWeights: TypeAlias = Union[str, "os.PathLike[str]", Mapping[str, Tensor], Source, Iterable[tuple[str, Tensor]]]
"""The sources of a load: a folder or its hub name, a mapping of HF names to tensors, or pairs of these."""


def open_source(weights: HFWeights, note: object = None) -> Source | Pairs:
    """Open HF weights from any kind of source. Only pairs cannot be checked before they arrive.

    Args:
        weights: see ``HFWeights``.
        note: the quantization in a config. A folder has its own config, which is used instead.

    Raises:
        CheckpointError: ``weights`` has another type; or as for ``open_folder``.
        ConfigError: the name stands for no folder, or the config names a format that is not supported.
    """
    if isinstance(weights, Source):
        return weights
    if isinstance(weights, str | os.PathLike):
        return open_folder(find_folder(weights))
    quantization = read_quantization(note)
    if isinstance(weights, Mapping):
        tensors: Mapping[str, Any] = weights
        if foreign := [name for name in tensors if not isinstance(name, str)]:
            raise CheckpointError(f"the source must have HF names as keys, found {shown(foreign[0])}: leave it out")
        return Source(tensors, scheme_within(specs_of(tensors), quantization))
    if isinstance(weights, Iterable):
        return Pairs(weights, quantization)
    raise CheckpointError(
        f"expected a folder, a mapping of HF names to tensors, or an iterable of such pairs, found {shown(weights)}: "
        "pass one of them"
    )
