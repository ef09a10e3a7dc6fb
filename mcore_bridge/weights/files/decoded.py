"""A source of HF tensors whose encoded weights look like plain ones, by their names, shapes and slices."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from mcore_bridge.config.quantization import Grain, Quantization, read_quantization
from mcore_bridge.errors import CheckpointError
from mcore_bridge.rules.encoded import Encoded
from mcore_bridge.rules.scheme import Held, Scheme, is_part, is_unused, scheme_of, stem_of, unreadable
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.files.hf_folder import Checkpoint
from mcore_bridge.weights.files.positional_io import read_bounded
from mcore_bridge.weights.files.safetensors import SafetensorsFile
from mcore_bridge.weights.files.sidecars import MODELOPT

_NOTE = "quantization_config"
_NOTE_BYTES = 100_000_000
"""More than any config has."""
Stored: TypeAlias = Tensor | Encoded
"""An HF tensor of a source: plain, or to be decoded."""


class Decoded(Mapping[str, Stored]):
    """HF tensors by their plain names. Encoded ones are ``Encoded``."""

    def __init__(self, source: Mapping[str, Tensor], scheme: Scheme) -> None:
        self._source = source
        self.scheme = scheme
        self._own: dict[str, str | Held] = {name: scheme.held.get(name, name) for name in scheme.plain(source)}

    def __getitem__(self, name: str) -> Stored:
        own = self._own[name]
        return self._source[own] if isinstance(own, str) else _encoded(name, own, self._source)

    def described(self, name: str) -> Stored | Held:
        """What a check of shapes needs. Most encoded tensors are not opened for it."""
        own = self._own[name]
        return self[name] if isinstance(own, str) or own.shape_tensor is not None else own

    def __contains__(self, name: object) -> bool:
        return name in self._own

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)

    def rename(self, old: str, new: str) -> None:
        """Give the tensor ``old`` the name ``new``."""
        self._own[new] = self._own.pop(old)

    def own_names(self, name: str) -> tuple[str, ...]:
        """The names in the source for a tensor: if it is encoded, those of its parts."""
        own = self._own[name]
        return (own,) if isinstance(own, str) else own.parts


class DecodedCheckpoint(Decoded):
    """``Decoded`` for a folder, whose tensors are in files."""

    def __init__(self, checkpoint: Checkpoint, scheme: Scheme) -> None:
        super().__init__(checkpoint, scheme)
        self._checkpoint = checkpoint
        self.folder = checkpoint.folder

    def files_of(self, name: str) -> tuple[SafetensorsFile, ...]:
        """The file of a tensor or, if it is encoded, the file of each part."""
        return tuple(map(self._checkpoint.file_of, self.own_names(name)))

    def turn(self, names: Iterable[str]) -> None:
        """See ``Checkpoint.turn``. These tensors are plain ones."""
        self._checkpoint.turn(names)

    def require_unchanged(self) -> None:
        """See ``Checkpoint.require_unchanged``."""
        self._checkpoint.require_unchanged()

    def release(self, name: str) -> None:
        """Give back the memory of pages that were read for ``name``."""
        for own in self.own_names(name):
            self._checkpoint.release(own)

    def pairs(self, names: Iterable[str]) -> Iterator[tuple[str, Stored]]:
        """See ``Checkpoint.pairs``."""
        for name in names:
            yield name, self[name]
            self.release(name)


Folder: TypeAlias = Checkpoint | DecodedCheckpoint


def opened_folder(checkpoint: Checkpoint) -> Folder:
    """The folder as a source of plain tensors. A folder without encoded weights is returned unchanged.

    Raises:
        CheckpointError: encoded weights cannot be decoded, or differ from the config.
        ConfigError: the config names a format that is not supported.
    """
    specs = {name: spec for name in checkpoint if (spec := checkpoint.spec(name)) is not None}
    if not any(map(is_part, specs.values())):
        return checkpoint
    scheme = scheme_within(specs, quantization_in(checkpoint.folder))
    return DecodedCheckpoint(checkpoint, scheme) if scheme.held else checkpoint


def decoded_mapping(source: Mapping[str, Tensor], quantization: Quantization | None) -> Mapping[str, Stored]:
    """The mapping as a source of plain tensors; see ``opened_folder``, also for the errors."""
    scheme = scheme_within(_specs(source), quantization)
    return Decoded(source, scheme) if scheme.held else source


class DecodedPairs(Iterable[tuple[str, Stored]]):
    """Pairs of plain names and tensors. A possible part of an encoded weight waits until all parts have come.

    Raises:
        CheckpointError: at the end, parts are incomplete; the message names them.
    """

    def __init__(self, source: Iterable[tuple[str, Tensor]], quantization: Quantization | None) -> None:
        self._source = source
        self._quantization = quantization
        self._waiting: dict[str, dict[str, Tensor]] = {}
        """Parts by the common prefix of their names."""
        self.unused: list[str] = []

    def __iter__(self) -> Iterator[tuple[str, Stored]]:
        done: set[str] = set()
        for name, tensor in self._source:
            if not isinstance(tensor, Tensor) or not is_part(TensorSpec.of(name, tensor)):
                yield name, tensor
                continue
            group = self._waiting.setdefault(stem_of(name), {})
            if name in group or name in done:
                raise CheckpointError(f"{name} came twice; every HF tensor must come exactly once")
            group[name] = tensor
            for plain, held in self._complete(group):
                yield plain, _encoded(plain, held, group)
                done.update(held.names)
                for part in held.names:
                    del group[part]
        yield from self._rest(is_quantized=bool(done))

    def _complete(self, group: Mapping[str, Tensor]) -> list[tuple[str, Held]]:
        """The encoded weight of ``group``, if all its parts have come. The stored shape of int4 is one of them."""
        try:
            held = scheme_within(_specs(group), self._quantization).held
        except CheckpointError:  # incomplete, or wrong, which raises at the end
            return []
        return [(name, weight) for name, weight in held.items() if weight.codec.kind != "int4" or weight.shape_tensor]

    def _rest(self, *, is_quantized: bool) -> Iterator[tuple[str, Stored]]:
        left = {name: tensor for group in self._waiting.values() for name, tensor in group.items()}
        scheme = scheme_within(_specs(left), self._quantization)
        for name, tensor in Decoded(left, scheme).items():
            if is_quantized and is_unused(name):
                self.unused.append(name)
            else:
                yield name, tensor


def unused_in(source: object) -> list[str]:
    """The names in a source that no weight needs, once the source has been read."""
    if isinstance(source, Decoded):
        return list(source.scheme.unused)
    return source.unused if isinstance(source, DecodedPairs) else []


def quantization_in(folder: Path) -> Quantization | None:
    """The quantization that the configs of a folder describe; None if there is none.

    Raises:
        ConfigError: the format is not supported.
        CheckpointError: ``hf_quant_config.json`` is no file, or no JSON.
    """
    try:
        note = _note_in(_json_of(folder / "config.json"))
    except CheckpointError:  # code that needs a config raises elsewhere
        note = None
    if note is None and os.path.lexists(folder / MODELOPT):
        note = _json_of(folder / MODELOPT)
    return read_quantization(note)


def _json_of(path: Path) -> object:
    try:
        return json.loads(read_bounded(path, _NOTE_BYTES))
    except (RecursionError, ValueError) as error:
        raise CheckpointError(f"{path} must be JSON, but is not: {error}; copy it again") from None


def _note_in(fields: object) -> object:
    """The note on quantization in a config; of a composite, the text config may have it."""
    text = fields.get("text_config") if isinstance(fields, dict) else None
    parts = [part for part in (fields, text) if isinstance(part, dict)]
    return next((part[_NOTE] for part in parts if part.get(_NOTE) is not None), None)


def scheme_within(specs: Mapping[str, TensorSpec], quantization: Quantization | None) -> Scheme:
    """The scheme of these tensors, which must agree with the config.

    Raises:
        CheckpointError: tensors do not fit together, or differ from the config; the message names all of them.
    """
    scheme = scheme_of(specs, quantization.block if quantization is not None else None)
    if quantization is not None:
        wrong = [f"{name} is {held.codec}" for name, held in scheme.held.items() if not _allows(quantization, held)]
        if wrong:
            said = ", ".join(f"{kind} by {grain}" for kind, grain in sorted(quantization.allowed, key=str))
            said = said or "nothing of weights"
            raise unreadable([f"quantization_config says {said}, found others: {', '.join(wrong[:5])}"])
    return scheme


def _specs(source: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec.of(name, tensor) for name, tensor in source.items() if isinstance(tensor, Tensor)}


def _allows(quantization: Quantization, held: Held) -> bool:
    """Whether the config allows the encoding. For a small weight, blocks are equal if both cover it whole."""
    stored = tuple(held.shape[dim] for dim in held.order)[-2:]
    sizes: dict[Grain, tuple[int, ...]] = {"tensor": stored, "row": (1, stored[1])}
    block = tuple(map(min, held.codec.block[-2:], stored))
    return any(
        kind == held.codec.kind and tuple(map(min, sizes.get(grain, grain), stored)) == block
        for kind, grain in quantization.allowed
    )


def _encoded(name: str, held: Held, source: Mapping[str, Tensor]) -> Encoded:
    """The weight with its tensors, in the shapes that its codec expects."""
    codes, scales, *overall = (source[part] for part in held.parts)
    shape = held.shape if held.shape_tensor is None else tuple(source[held.shape_tensor].tolist())
    if shape != held.shape:
        raise unreadable([f"{held.shape_tensor} is {shape}, while there are codes for {held.shape}"])
    if held.codec.kind == "mxfp4":
        codes = codes.flatten(2)
    stored = (held.shape[dim] for dim in held.order)
    scales = scales.reshape([-(-size // block) for size, block in zip(stored, held.codec.block, strict=True)])
    codes = codes if codes.dtype == torch.uint8 else codes.view(torch.uint8)
    return Encoded(name, held.codec, held.shape, held.order, codes, scales, overall[0].view(1) if overall else None)
