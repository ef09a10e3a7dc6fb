"""HF folders to checkpoints of Megatron's ``torch`` format, without a model or a process group.

One writer at a time makes a folder, which appears whole; a folder that was made of another source, or for another mesh,
is never taken for the one that was asked for. A file is made in memory, one after the other.
"""

from __future__ import annotations

import pickle
import shutil
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_bridge.config.hf import find_folder
from mcore_bridge.errors import CheckpointError
from mcore_bridge.trainers.rlinf.conversion import Conversion, ExtraState, as_conversion, read_conversion
from mcore_bridge.trainers.rlinf.folder import fingerprint, made_once
from mcore_bridge.trainers.rlinf.layout import FileLayout, RankFile
from mcore_bridge.trainers.rlinf.middle import MiddleFiles, write_middle
from mcore_bridge.weights.checkpoint import Checkpoint

FILE = "model_optim_rng.pt"
RELEASE = "release"
LATEST = "latest_checkpointed_iteration.txt"
_COMPANIONS = ("*.json", "*.py", "*.md", "LICENSE")


def convert_hf_to_mg(hf_ckpt_path: str, ckpt_cfg: Mapping[str, Any]) -> None:
    """Write ``release/mp_rank_{tp:02d}[_{pp:03d}][_{ep:03d}]/model_optim_rng.pt`` of an HF folder.

    Does nothing where ``save_path`` has been made of this source for this mesh. Both stages at once, without files in
    between.

    Args:
        hf_ckpt_path: the HF folder.
        ckpt_cfg: the block ``ckpt_convertor``.

    Raises:
        ConfigError: as ``read_conversion``.
        CheckpointError: ``save_path`` holds something else, or the source does not fit the model.
        MeshError: the sizes do not fit the model.
    """
    conversion = read_conversion(hf_ckpt_path, ckpt_cfg)
    folder = find_folder(conversion.load_path)
    with made_once(Path(conversion.save_path), fingerprint(folder, conversion)) as staging:
        if staging is not None:
            _write(Checkpoint(folder), folder, conversion, staging)


def hf_to_middle_file(convert_config: Any) -> None:
    """The first stage alone: a file of safetensors for each layer in ``save_path``, for any mesh, in Megatron's names.

    Args:
        convert_config: a ``Conversion``, or RLinf's ``ConvertorConfig``.

    Raises:
        CheckpointError: as for ``convert_hf_to_mg``.
    """
    conversion = as_conversion(convert_config)
    folder = find_folder(conversion.load_path)
    with made_once(Path(conversion.save_path), fingerprint(folder)) as staging:
        if staging is not None:
            source = Checkpoint(folder)
            layout = FileLayout(folder, Conversion(load_path="", save_path="").dims, shapes_of(source))
            write_middle(layout, source, staging)
            _copy_companions(folder, staging)


def middle_file_to_mg(convert_config: Any) -> None:
    """The second stage alone: from the files of the first in ``load_path`` to those of a mesh in ``save_path``.

    Args:
        convert_config: a ``Conversion``, or RLinf's ``ConvertorConfig``.

    Raises:
        CheckpointError: as for ``convert_hf_to_mg``, or where both paths are one folder.
    """
    conversion = as_conversion(convert_config)
    folder = Path(conversion.load_path)
    if folder.resolve() == Path(conversion.save_path).resolve():
        raise CheckpointError(f"load_path and save_path must be two folders, found {folder} twice")
    with made_once(Path(conversion.save_path), fingerprint(folder, conversion)) as staging:
        if staging is not None:
            _write(MiddleFiles(folder), folder, conversion, staging)


def layout_of(shapes: Mapping[str, tuple[int, ...]], folder: Path, conversion: Conversion) -> FileLayout:
    fused, grouped = conversion.te_ln_linear_qkv, conversion.grouped_gemm == "te"
    return FileLayout(folder, conversion.dims, shapes, fused_norms=fused, grouped=grouped)


def shapes_of(source: Mapping[str, Tensor]) -> Mapping[str, tuple[int, ...]]:
    if isinstance(source, MiddleFiles):
        return source.shapes
    return {name: tuple(tensor.shape) for name, tensor in source.items()}


def _write(source: Mapping[str, Tensor], folder: Path, conversion: Conversion, staging: Path) -> None:
    layout = layout_of(shapes_of(source), folder, conversion)
    for file in layout.files():
        models = _models(layout, file, source, conversion.te_ln_add_extra_state)
        path = staging / RELEASE / file.name / FILE
        path.parent.mkdir(parents=True)
        torch.save({**models, "iteration": -1, "checkpoint_version": 3.0}, path)
    (staging / LATEST).write_text(RELEASE)
    _copy_companions(folder, staging)


def _models(
    layout: FileLayout, file: RankFile, source: Mapping[str, Tensor], extra_state: ExtraState
) -> dict[str, OrderedDict[str, Tensor | None]]:
    """What a file holds, by the key of each chunk."""
    models: dict[str, OrderedDict[str, Tensor | None]] = {}
    for model, name, mcore, shard in layout.held(file):
        models.setdefault(model, OrderedDict())[name] = layout.shard(mcore, shard, source)
    if extra_state is not None:
        for state in models.values():
            for name in _extra_states(state):
                state[name] = _filler(extra_state)
    return models


def _extra_states(state: Mapping[str, object]) -> list[str]:
    """The names of the extra states of all modules of the decoder but routers."""
    ends = (".weight", ".bias", ".weight0")
    modules = (name.rpartition(".")[0] for name in state if name.startswith("decoder.") and name.endswith(ends))
    return [f"{module}._extra_state" for module in dict.fromkeys(modules) if not module.endswith(".router")]


def _filler(extra_state: ExtraState) -> Tensor | None:
    """What TransformerEngine finds where there is no state of FP8; which of them, depends on its release."""
    if extra_state == "none":
        return None
    if extra_state == "tensor_0_dim":
        return torch.tensor([])
    return torch.frombuffer(bytearray(pickle.dumps(None)), dtype=torch.uint8)


def _copy_companions(folder: Path, staging: Path) -> None:
    for pattern in _COMPANIONS:
        for path in folder.glob(pattern):
            if path.is_file() and not path.name.endswith(".index.json") and not (staging / path.name).exists():
                shutil.copy2(path, staging / path.name)
