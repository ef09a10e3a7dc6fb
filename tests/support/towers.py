"""Composites with built towers: the steps of each rank, and transformers' tensors under equal names."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mcore_bridge as mb
from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.vision.tower import JoinedPart, require_tower
from mcore_bridge.weights.provenance import provenance_of
from tests.support import composites as tiny
from tests.support.stepping import leave_mesh
from tests.support.written_weights import read


def is_built(name: str) -> bool:
    """Whether the tower of a composite can be built with the installed transformers."""
    try:
        require_tower(provenance_of(tiny.config(name)).whole, "train")
    except ConfigError:
        return False
    return True


NAMES = [name for name in tiny.NAMES if is_built(name)]


def go_round(folder: Path, dims: mb.ParallelDims, work: Path) -> list[dict[str, Tensor]]:
    """Runs on each rank: load, export, save and write a checkpoint of megatron-core, and read this checkpoint.

    Return the tower with random values, and with the values of the folder; nothing on a rank without a tower.
    """
    dims.initialize(device="cpu")
    build: dict[str, Any] = {"dims": dims, "dtype": torch.float32, "device": "cpu", "vision": "train"}
    models = mb.build_model(folder, **build)
    source = read(folder)
    exported = dict(mb.iter_hf_weights(models))
    beside = models[0].bridge.whole.composite.not_built
    assert exported.keys() == {name for name in source if not name.startswith(beside)}
    assert all(torch.equal(tensor, source[name]) for name, tensor in exported.items())
    engine = mb.EngineRank(tp=2, tp_rank=torch.distributed.get_rank())
    sliced = dict(mb.iter_hf_weights(models, target=engine))
    _, of_tower = tiny.parts_of(folder)
    of_tower = {name: tensor for name, tensor in of_tower.items() if not name.startswith(beside)}
    assert all(torch.equal(sliced[name], tensor) for name, tensor in of_tower.items())  # whole; an engine cuts it
    written = mb.save_hf_checkpoint(models, work / "saved")
    mb.save_checkpoint(models, work / "dist")
    again = mb.build_model(folder, **build, load_weights=False, seed=7)
    drawn = {name: tensor.clone() for name, tensor in tower_of(again).items()}
    mb.load_checkpoint(again, work / "dist")
    assert mb.manifest(again, digests=True) == mb.manifest(models, digests=True)
    assert beside or written.differences(mb.manifest(models)) == ()
    leave_mesh()
    return [drawn, tower_of(models)] if drawn else []


def tower_of(models: list[Any]) -> dict[str, Tensor]:
    """The tensors of the tower on this rank, by their names in transformers' model."""
    towers = [chunk.vision for chunk in models if hasattr(chunk, "vision")]
    held = {name: tensor for tower in towers for name, tensor in tower.state_dict().items() if ".wqkv." not in name}
    for name, part in ((name, part) for tower in towers for name, part in tower.named_modules()):
        if isinstance(part, JoinedPart):
            held |= {f"{name}.weight": part.weight.detach(), f"{name}.bias": part.bias.detach()}
    return held


def in_transformers(name: str, folder: Path) -> dict[str, Tensor]:
    """The tensors of the tower that transformers has read from a folder."""
    model = tiny.thinker_of(tiny.model_class(name).from_pretrained(folder))
    whole = getattr(model, "model", model).state_dict()
    return {key: tensor for key, tensor in whole.items() if not key.startswith("language_model.")}
