"""One file of Megatron's ``torch`` format: the parameters for the ranks of one place on the mesh."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from mcore_bridge.convert.assemble import HFTensors
from mcore_bridge.convert.rank_files.file_layout import FileLayout, RankFile
from mcore_bridge.errors import CheckpointError
from mcore_bridge.weights.dist_checkpoint.extra_state import SUFFIX, fillers
from mcore_bridge.weights.dist_checkpoint.folder import VERSION
from mcore_bridge.weights.files.torch_save import read_torch_file, write_torch_file

_CHUNK = re.compile(r"model[0-9]{0,9}")
NAME = "model_optim_rng.pt"
RELEASE = "release"


def write_rank_file(
    path: Path,
    layout: FileLayout,
    file: RankFile,
    source: HFTensors,
    device: str = "cpu",
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Write a file, one parameter after the other.

    Args:
        source: HF tensors.
        device: the device on which parameters are assembled.
        progress: called with the bytes of each parameter.
    """
    shards = {(model, name): (mcore, shard) for model, name, mcore, shard in layout.held(file)}
    models: dict[str, OrderedDict[str, Tensor | None]] = {}
    for (model, name), (mcore, _) in shards.items():
        shape = layout.trace(mcore).shard_shape
        models.setdefault(model, OrderedDict())[name] = torch.empty(shape, dtype=layout.dtype(mcore))
    for state in models.values():
        state.update(fillers(state, layout.style.extra_state))

    def tensors() -> Iterator[Tensor]:
        for model, state in models.items():
            for name, tensor in state.items():
                if (model, name) in shards:
                    shard = layout.shard(*shards[model, name], source, device)
                    progress(shard.nbytes)
                    yield shard
                elif tensor is not None:
                    yield tensor

    write_torch_file(path, {**models, "iteration": -1, **VERSION}, tensors())


def read_rank_file(path: Path) -> dict[str, Mapping[str, Tensor]]:
    """The parameters in a file, by the key of each chunk. They are views of the mapped file.

    Raises:
        CheckpointError: the file is damaged, or only code can read it.
    """
    chunks = {key: value for key, value in read_torch_file(path).items() if _CHUNK.fullmatch(str(key))}
    states: dict[str, Mapping[str, Tensor]] = {}
    for key, state in chunks.items():
        if not isinstance(state, Mapping):
            raise CheckpointError(f"{path} must hold a dict of tensors as {key!r}, found {type(state).__name__}")
        states[key] = {name: tensor for name, tensor in state.items() if not str(name).endswith(SUFFIX)}
        others = [
            name for name, tensor in states[key].items() if not (isinstance(name, str) and _is_plain(name, tensor))
        ]
        if others:
            raise CheckpointError(f"{path} must hold plain tensors, found others as {others[:8]} of {key!r}")
    return states


def _is_plain(name: str, tensor: object) -> bool:
    """Whether a value is a dense tensor on the CPU, or None. For a weight: a tensor with at least one dim."""
    if not isinstance(tensor, Tensor):
        return tensor is None and "weight" not in name
    if "weight" in name and not tensor.dim():
        return False
    return tensor.layout is torch.strided and tensor.is_cpu and not tensor.is_quantized and not tensor.is_nested
