"""Checkpoints of Megatron's ``torch`` format as HF tensors again, without a model or a process group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_bridge.config.hf import find_folder
from mcore_bridge.errors import CheckpointError
from mcore_bridge.trainers.rlinf.conversion import read_conversion
from mcore_bridge.trainers.rlinf.convertor import FILE, RELEASE, layout_of, shapes_of
from mcore_bridge.trainers.rlinf.layout import FileLayout
from mcore_bridge.weights.checkpoint import Checkpoint
from mcore_bridge.weights.mapping import unstacked


def iter_mg_weights(folder: str, hf: str, ckpt_cfg: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield every HF tensor of a checkpoint that was so written, whole: a source of ``load_hf_weights``.

    Files are mapped, and each tensor is made when it is asked for.

    Args:
        folder: ``save_path`` of the conversion.
        hf: the HF folder that it was made of.
        ckpt_cfg: the block that it was made by.

    Raises:
        CheckpointError: a file or a parameter is missing.
    """
    conversion = read_conversion(hf, {**ckpt_cfg, "save_path": folder})
    source = find_folder(conversion.load_path)
    layout = layout_of(shapes_of(Checkpoint(source)), source, conversion)
    shards: dict[str, dict[int, Tensor]] = {}
    for file in layout.files():
        models = _read(Path(folder) / RELEASE / file.name / FILE)
        for model, name, mcore, shard in layout.held(file):
            if name not in models.get(model, {}):
                raise CheckpointError(f"{file.name} must hold {name} in {model}, and lacks it; convert again")
            shards.setdefault(mcore, {})[shard] = models[model][name]
    yield from _to_hf(layout, shards)


def _to_hf(layout: FileLayout, shards: Mapping[str, Mapping[int, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    stacks: dict[str, dict[int, Tensor]] = {}
    for mcore, binding in layout.bindings.items():
        if not binding.exported:
            continue
        traced = layout.trace(mcore)
        for number, hf in enumerate(binding.hf):
            part = traced.part(number, shards[mcore])
            name, entry = unstacked(hf)
            if entry is None:
                yield name, part
                continue
            stack = stacks.setdefault(name, {})
            stack[entry] = part
            if len(stack) == layout.axes["experts"]:
                del stacks[name]
                yield name, torch.stack([stack[index] for index in sorted(stack)])


def _read(path: Path) -> dict[str, Mapping[str, Tensor]]:
    if not path.is_file():
        raise CheckpointError(f"{path} must be a file of this checkpoint, and is none; convert again")
    found: dict[str, Mapping[str, Tensor]] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    return {key: value for key, value in found.items() if key.startswith("model")}
