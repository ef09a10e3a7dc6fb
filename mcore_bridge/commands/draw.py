"""``mcore-bridge draw``: writes a random checkpoint for any config. Its tensors differ from each other."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mcore_bridge.architecture import read_hf
from mcore_bridge.commands import text
from mcore_bridge.commands.random_values import drawn
from mcore_bridge.config.class_names import class_in
from mcore_bridge.config.quantization import DESCRIPTION
from mcore_bridge.errors import CheckpointError, ConfigError
from mcore_bridge.machine import free_memory
from mcore_bridge.weights.files.atomic_folder import commit, target_of, updating
from mcore_bridge.weights.files.hf_folder import HEADS, foreign_weights
from mcore_bridge.weights.files.sidecars import NOTES
from mcore_bridge.weights.files.sources import SourceFolders
from mcore_bridge.weights.progress import tracked

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True, slots=True)
class Drawn:
    """The checkpoint that was written.

    Attributes:
        target: the folder.
        parameters: the number of parameters of the whole model.
        tensors: the number of tensors.
        bytes: the bytes of all tensors.
        files: names in the target.
    """

    target: Path
    parameters: int
    tensors: int
    bytes: int
    files: tuple[str, ...]


def render(answer: Drawn) -> str:
    """The report, as a line."""
    return (
        f"{answer.target} is drawn: {text.count(answer.parameters)} parameters in "
        f"{text.plural(answer.tensors, 'tensor')}, {text.num_bytes(answer.bytes)}"
    )


def draw(
    config: str | os.PathLike[str] | PretrainedConfig,
    folder: str | os.PathLike[str],
    *,
    num_layers: int | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    max_shard_bytes: int = 5_000_000_000,
    on_size: Callable[[int, int], object] = lambda parameters, num_bytes: None,
) -> Drawn:
    """Write a checkpoint of a config, by transformers, with random weights. The model has to fit into memory.

    Values of norms are around one, and all other values around zero. No value is zero or one. All values of a tensor
    differ, if its dtype has enough numbers.

    Args:
        config: a folder with a config.json, that file, a repository in the local hub cache, or a config.
        folder: the folder for the checkpoint. It may have a config and a tokenizer, but no weights.
        num_layers: the number of layers to build, instead of the number in the config.
        dtype: the dtype of the tensors. None: the dtype in the config, or float32.
        seed: other seeds draw other values.
        max_shard_bytes: upper limit on the size of a file, unless one tensor is larger.
        on_size: called with the number of parameters and their bytes, before the first value is drawn.

    Raises:
        ConfigError: transformers cannot build a model of the config, or its layers cannot be cut.
        CheckpointError: ``folder`` has weights, or cannot be written to; or the model does not fit into the free memory
            or on the disk.
    """
    target = target_of(folder)
    if weights := foreign_weights(target):
        raise CheckpointError(f"{target} must have no weights, found {', '.join(weights[:3])}: name another folder")
    hf = _read(config)
    if num_layers is not None:
        hf = _with_layers(hf, num_layers)
    dtype = dtype or hf.dtype or torch.float32
    tensors = _tensors_of(_built(hf, dtype, "meta"))
    parameters, num_bytes = sum(tensor.numel() for tensor in tensors), sum(tensor.nbytes for tensor in tensors)
    on_size(parameters, num_bytes)
    _require_room(target, num_bytes)
    model = _random_model(hf, dtype, seed)
    with updating(target) as update:
        model.save_pretrained(update.new, max_shard_size=max_shard_bytes)
        names = tuple(sorted(path.name for path in update.new.iterdir()))
        commit(update, SourceFolders(), NOTES, HEADS)
    return Drawn(target, parameters, len(tensors), num_bytes, names)


def _require_room(target: Path, num_bytes: int) -> None:
    place = next(folder for folder in (target, *target.parents) if folder.is_dir())
    free = {"memory": free_memory(), f"the disk of {place}": shutil.disk_usage(place).free}
    short = [f"{text.num_bytes(size)} of {where}" for where, size in free.items() if size < num_bytes]
    if short:
        raise CheckpointError(
            f"the model needs {text.num_bytes(num_bytes)} of memory and of disk, found only {' and '.join(short)} "
            "free: draw fewer layers with --layers, in a narrower --dtype, or where there is more room"
        )


def _read(config: str | os.PathLike[str] | PretrainedConfig) -> PretrainedConfig:
    if isinstance(config, str | os.PathLike) and Path(config).is_file():
        if Path(config).name != "config.json":
            raise ConfigError(f"A config must be a folder or its config.json, found the file {config}. Rename it.")
        config = Path(config).parent
    hf = read_hf(config)
    for name in DESCRIPTION:  # what is drawn is not quantized
        if hasattr(hf, name):
            delattr(hf, name)
    return hf


def _with_layers(hf: PretrainedConfig, num_layers: int) -> PretrainedConfig:
    from mcore_bridge.factory.blueprint import BuildOptions, make_blueprint

    options = BuildOptions(dtype=torch.float32, device="cpu", overrides={"num_layers": num_layers})
    return make_blueprint(hf, options).provenance.config


def _random_model(hf: PretrainedConfig, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = _built(hf, dtype, "cpu")
    with torch.no_grad():
        names = {id(tensor): name for name, tensor in reversed(model.state_dict(keep_vars=True).items())}
        for tensor in tracked(_tensors_of(model), "draw", names.__len__):
            if tensor.is_floating_point():
                tensor.copy_(drawn(names[id(tensor)], tensor, seed=seed))
    return model


def _tensors_of(model: PreTrainedModel) -> list[Tensor]:
    """The tensors that a save writes. A tied one is there once."""
    return [*{id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}.values()]


def _built(hf: PretrainedConfig, dtype: torch.dtype, device: str) -> PreTrainedModel:
    model_class = class_of(hf)
    try:
        with torch.device(device):
            model: PreTrainedModel = model_class._from_config(hf, dtype=dtype)
    except Exception as error:  # a model may raise any type
        raise ConfigError(
            f"transformers must build a {model_class.__name__} of this config, but cannot: {error}. Correct the config."
        ) from error
    return model


def class_of(hf: PretrainedConfig) -> Any:
    """The class of transformers that a config names, or else the one with an LM head."""
    import transformers
    from transformers.models.auto.auto_factory import _get_model_class

    for name in class_in(hf) or ():
        named = getattr(transformers, name, None)
        if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
            return named
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText):
        known: Mapping[Any, Any] = auto._model_mapping
        if type(hf) in known:
            return _get_model_class(hf, known)
    raise ConfigError(
        f"transformers must have a language model for the config, found none for {hf.model_type!r}. Install a release "
        "that has it, or register its class with transformers."
    )
