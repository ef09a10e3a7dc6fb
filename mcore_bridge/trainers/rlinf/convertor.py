"""RLinf's offline convertor: HF folders to Megatron's ``torch`` format, without a model or a process group.

One writer at a time makes a folder, which appears only when it is complete. A folder from another source, or for
another mesh, is detected. Files are written one parameter after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcore_bridge.architecture import read_hf
from mcore_bridge.arguments import given_path
from mcore_bridge.config.hf import find_folder, read_fields, write_fields
from mcore_bridge.config.mesh.parallel_dims import ParallelDims
from mcore_bridge.convert.rank_files.file import NAME, RELEASE, write_rank_file
from mcore_bridge.convert.rank_files.file_layout import FileLayout
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.trainers.rlinf.cached_folder import made_once
from mcore_bridge.trainers.rlinf.convertor_settings import ConvertorSettings, as_conversion, read_conversion
from mcore_bridge.trainers.rlinf.middle_files import MiddleFiles, write_middle
from mcore_bridge.weights.dist_checkpoint.folder import TRACKER
from mcore_bridge.weights.files.sidecars import copy_companions, forget_quantization
from mcore_bridge.weights.source.source import Source, open_folder

_OTHERS = ("*.json", "*.py", "*.md", "LICENSE")
"""Further files that RLinf copies."""


def convert_hf_to_mg(hf_ckpt_path: str, ckpt_cfg: Mapping[str, Any]) -> None:
    """Convert an HF folder to files ``release/mp_rank_{tp:02d}[_{pp:03d}][_{ep:03d}]/model_optim_rng.pt``.

    This does both stages at once, without middle files. It does nothing if ``save_path`` was already made from this
    source for this mesh.

    Args:
        hf_ckpt_path: the HF folder.
        ckpt_cfg: the block ``ckpt_convertor``.

    Raises:
        ConfigError: as ``read_conversion``.
        CheckpointError: ``save_path`` has other content, or the source does not fit the model.
        MeshError: the sizes do not fit the model.
    """
    conversion = read_conversion(hf_ckpt_path, ckpt_cfg)
    folder = find_folder(conversion.load_path)
    with made_once(conversion.save_path, folder, conversion) as staging:
        if staging is not None:
            _write(_opened(folder), folder, conversion, staging)


def hf_to_middle_file(convert_config: Any) -> None:
    """Do only the first stage: write a file of safetensors for each layer, with Megatron's names, for any mesh.

    Args:
        convert_config: a ``ConvertorSettings``, or RLinf's ``ConvertorConfig``.

    Raises:
        CheckpointError: as for ``convert_hf_to_mg``.
    """
    conversion = as_conversion(convert_config)
    folder = find_folder(conversion.load_path)
    with made_once(conversion.save_path, folder) as staging:
        if staging is not None:
            source = _opened(folder)
            layout = FileLayout(folder, ConvertorSettings(load_path="", save_path="").dims, _specs_of(source))
            write_middle(layout, source, staging)
            _copy_rest(folder, layout, staging)


def middle_file_to_mg(convert_config: Any) -> None:
    """Do only the second stage: from middle files in ``load_path`` to the files for a mesh in ``save_path``.

    Args:
        convert_config: a ``ConvertorSettings``, or RLinf's ``ConvertorConfig``.

    Raises:
        CheckpointError: as for ``convert_hf_to_mg``, or if both paths are one folder.
    """
    conversion = as_conversion(convert_config)
    folder = given_path(conversion.load_path)
    with made_once(conversion.save_path, folder, conversion) as staging:
        if staging is not None:
            _write(MiddleFiles(folder), folder, conversion, staging)


def _write(source: Source | MiddleFiles, folder: Path, conversion: ConvertorSettings, staging: Path) -> None:
    layout = FileLayout(folder, conversion.dims, _specs_of(source), conversion.style)
    for file in layout.files():
        path = staging / RELEASE / file.name / NAME
        path.parent.mkdir(parents=True)
        write_rank_file(path, layout, file, source)
    (staging / TRACKER).write_text(RELEASE)
    _copy_rest(folder, layout, staging)


def _copy_rest(folder: Path, layout: FileLayout, staging: Path) -> None:
    """Copy all files except weights. Note in the config whether the head is tied, which later readers cannot check."""
    copy_companions(folder, staging, *_OTHERS)
    forget_quantization(staging)
    tied = bool(layout.provenance.hf.tie_word_embeddings)
    if tied != bool(read_hf(folder).tie_word_embeddings):
        config = staging / "config.json"
        write_fields(config, {**read_fields(config), "tie_word_embeddings": tied})


def _opened(folder: Path) -> Source:
    return open_folder(folder, FileLayout(folder, ParallelDims(), {}).mapping)


def _specs_of(source: Source | MiddleFiles) -> Mapping[str, TensorSpec]:
    if isinstance(source, MiddleFiles):
        return source.specs
    return {name: TensorSpec.of(name, tensor) for name, tensor in source.items()}
