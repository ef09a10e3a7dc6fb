"""Finds the encoded weights of a source by its tensors and config, and opens them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_bridge.config.quantization import Grain, Quantization, description_in, note_of, read_quantization
from mcore_bridge.errors import CheckpointError
from mcore_bridge.foreign_files import read_json
from mcore_bridge.rules.encoded import Encoded
from mcore_bridge.rules.scheme import Encoding, Scheme, is_part, scheme_of, unreadable
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.files.hf_folder import Checkpoint
from mcore_bridge.weights.files.sidecars import MODELOPT


def scheme_in(checkpoint: Checkpoint) -> Scheme:
    """The scheme of a folder's tensors; see ``scheme_within`` and ``quantization_in`` for the errors."""
    specs = {name: spec for name in checkpoint if (spec := checkpoint.spec(name)) is not None}
    if not any(map(is_part, specs.values())):
        return Scheme()
    return scheme_within(specs, quantization_in(checkpoint.folder))


def specs_of(tensors: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    """The specs of a mapping's tensors. Other values are left out."""
    return {name: TensorSpec.of(name, tensor) for name, tensor in tensors.items() if isinstance(tensor, Tensor)}


def quantization_in(folder: Path) -> Quantization | None:
    """The quantization that the configs of a folder describe; None if there is none.

    Raises:
        ConfigError: the format is not supported.
        CheckpointError: ``hf_quant_config.json`` is no file, or no JSON.
    """
    note = note_of(description_of(folder))
    if note is None and os.path.lexists(folder / MODELOPT):
        note = read_json(folder / MODELOPT)
    return read_quantization(note)


def description_of(folder: Path) -> dict[str, Any]:
    """The fields in the config.json of a folder that describe encoded weights, as they stand there; maybe none.

    In a composite, they may be in the text config.
    """
    try:
        fields = read_json(folder / "config.json", finite=False)
    except CheckpointError:  # code that needs a config raises elsewhere
        return {}
    text = fields.get("text_config") if isinstance(fields, dict) else None
    parts = [part for part in (fields, text) if isinstance(part, dict)]
    return next((described for part in parts if (described := description_in(part))), {})


def scheme_within(specs: Mapping[str, TensorSpec], quantization: Quantization | None) -> Scheme:
    """The scheme of these tensors, which must agree with the config.

    Raises:
        CheckpointError: tensors do not fit together, or differ from the config; the message names all of them.
    """
    if quantization is None:
        return scheme_of(specs)
    scheme = scheme_of(specs, quantization.block, powers=quantization.powers)
    if wrong := [f"{name} is {held.codec}" for name, held in scheme.held.items() if not _allows(quantization, held)]:
        said = ", ".join(f"{kind} by {grain}" for kind, grain in sorted(quantization.allowed, key=str))
        said = said or "nothing of weights"
        raise unreadable([f"quantization_config says {said}, found others: {', '.join(wrong[:5])}"])
    return scheme


def _allows(quantization: Quantization, held: Encoding) -> bool:
    """Whether the config allows the encoding. For a small weight, blocks are equal if both cover it whole."""
    stored = tuple(held.shape[dim] for dim in held.order)[-2:]
    sizes: dict[Grain, tuple[int, ...]] = {"tensor": stored, "row": (1, stored[1])}
    block = tuple(map(min, held.codec.block[-2:], stored))
    return any(
        kind == held.codec.kind and tuple(map(min, sizes.get(grain, grain), stored)) == block
        for kind, grain in quantization.allowed
    )


def encoded(name: str, held: Encoding, source: Mapping[str, Tensor]) -> Encoded:
    """The weight with its tensors, in the shapes that its codec expects."""
    codes, scales, *overall = (source[part] for part in held.parts)
    shape = held.shape if held.shape_tensor is None else tuple(source[held.shape_tensor.name].flatten().tolist())
    if held.shape_tensor is not None and shape != held.shape:
        raise unreadable([f"{held.shape_tensor.name} is {shape}, while there are codes for {held.shape}"])
    codes = codes.flatten(len(held.shape) - 1)  # of gpt-oss, which has a dim of blocks
    scales = scales.reshape(held.grid)
    codes = codes if codes.dtype == torch.uint8 else codes.view(torch.uint8)
    return Encoded(name, held.codec, held.shape, held.order, codes, scales, overall[0].view(1) if overall else None)
