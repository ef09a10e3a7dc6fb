"""Checks a save over the folder that the models were loaded from. Trainers do this, and no cast may lose bits.

The folder may be the only copy of weights in a wider dtype. A model in a narrower dtype must not replace it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from mcore_bridge.errors import CheckpointError, plural
from mcore_bridge.rules.dtypes import dtype_name, is_exact
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.files.hf_folder import shard_names
from mcore_bridge.weights.model_chunks import Models, chunks_of
from mcore_bridge.weights.source.source import open_folder

_NOTE = "bridge_sources"
"""The attribute of a chunk that lists the folders from which weights were loaded."""


def note_source(models: Models, folder: str | os.PathLike[str]) -> None:
    """Store on models a folder from which weights were loaded."""
    for chunk in chunks_of(models):
        setattr(chunk, _NOTE, (*getattr(chunk, _NOTE, ()), os.path.realpath(folder)))


def is_source(models: Models, target: Path) -> bool:
    """Whether models came from this folder: they were built from it, or loaded from it."""
    places = {place for chunk in chunks_of(models) for place in getattr(chunk, _NOTE, ())}
    built = {chunk.bridge.folder for chunk in chunks_of(models) if getattr(chunk, "bridge", None)}
    return target.is_dir() and any(
        os.path.isdir(place) and os.path.samefile(place, target) for place in (places | built) - {None}
    )


def plain_dtypes(folder: Path, specs: Iterable[TensorSpec]) -> tuple[dict[str, torch.dtype], dict[str, torch.dtype]]:
    """The dtypes by name of the tensors of an HF folder, and of the tensors ``specs`` that a save would write.

    Tensors of weights that the folder has encoded are left out of both, since a load decodes them.
    """
    if not shard_names(folder):
        return {}, {}
    source = open_folder(folder)
    encoded = {name for held in source.scheme.held.values() for name in held.names}
    stored = {name: tensor.dtype for name, tensor in source.items() if isinstance(tensor, Tensor)}
    return stored, {spec.name: spec.dtype for spec in specs if spec.name not in encoded}


def require_held(target: Path, stored: Mapping[str, torch.dtype], written: Mapping[str, torch.dtype]) -> None:
    """Raise if a save over ``target`` would write a tensor in a dtype that cannot hold all values of the tensor there.

    Args:
        target: a folder that the models came from.
        stored, written: the dtypes of tensors by name. Names may differ, for example in the two formats of experts. So
            the most frequent dtypes are compared as well.
    """
    pairs = {name: (dtype, written[name]) for name, dtype in stored.items() if name in written}
    if stored and written:
        (before, _), (after, _) = (Counter(dtypes.values()).most_common(1)[0] for dtypes in (stored, written))
        pairs["most tensors"] = before, after
    lost = [
        f"{name} ({dtype_name(before)} there, {dtype_name(after)} now)"
        for name, (before, after) in pairs.items()
        if before.is_floating_point and not is_exact(before, after)
    ]
    if lost:
        raise CheckpointError(
            f"{target} is a folder that these models came from, and would lose bits of {plural(len(lost), 'tensor')}, "
            f"such as {lost[0]}. Name another folder, or build and save the models in the wider dtype"
        )
