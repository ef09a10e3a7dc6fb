"""Finds the checkpoint that Megatron loads after the model is built, and checks that Megatron will load all of it.

If Megatron's trainer finds no checkpoint, it ends without an error. If a parameter does not fit, it keeps random
values.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mcore_bridge.convert.rank_files.file import NAME, read_rank_file
from mcore_bridge.convert.rank_files.file_layout import chunk_of, folder_of
from mcore_bridge.convert.rank_files.rank_folder import find_rank_files
from mcore_bridge.errors import CheckpointError
from mcore_bridge.weights.dist_checkpoint.extra_state import SUFFIX
from mcore_bridge.weights.dist_checkpoint.folder import TRACKER, latest_in
from mcore_bridge.weights.files.sidecars import config_folders, first_with_config
from mcore_bridge.weights.model_chunks import is_hybrid

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

    from mcore_bridge.config.mesh.parallel_dims import ParallelDims

_NUM_NAMED = 4
"""Limit on the parameters that an error names; there may be thousands."""


def convertor_block(actor: Mapping[str, Any]) -> Mapping[str, Any]:
    """The block of the offline convertor: ``ckpt_convertor``, or ``ckpt`` in older versions."""
    megatron = actor.get("megatron") or {}
    block: Mapping[str, Any] = megatron.get("ckpt_convertor") or megatron.get("ckpt") or {}
    return block


def checkpoint_of(actor: Mapping[str, Any]) -> str | None:
    """The folder that RLinf's model manager makes Megatron load, from the same keys; None if there is none."""
    megatron = actor.get("megatron") or {}
    folder = actor["model"].get("megatron_checkpoint")
    if folder is None and megatron.get("use_hf_ckpt") and not megatron.get("mbridge"):
        folder = convertor_block(actor).get("save_path")
    return folder


def hf_folder_of(actor: Mapping[str, Any]) -> str | None:
    """The HF folder that the block names; None if it names none."""
    folder: str | None = actor["model"].get("model_path") or convertor_block(actor).get("hf_model_path")
    return folder


def config_of(folder: str) -> str | None:
    """The folder of the HF config in a checkpoint or beside it; None if there is none."""
    iterations = (*latest_in(Path(folder)), Path(folder))
    candidates = (path for iteration in iterations for path in config_folders(Path(folder), iteration))
    config_folder = first_with_config(candidates)
    return None if config_folder is None else str(config_folder)


def require_loads(chunk: GPTModel, folder: str, dims: ParallelDims, vp_stage: int, *, head: str) -> None:
    """Raise unless Megatron will load all of a chunk from ``folder``.

    This only reads names and shapes. For ``torch_dist`` Megatron itself requires every tensor.

    Args:
        dims: the mesh of the model.
        vp_stage: the virtual stage of the chunk.
        head: as for ``build_model``; a checkpoint only has the head of a language model.

    Raises:
        CheckpointError: there is no checkpoint, it is for another mesh, or it has other parameters.
    """
    if not (Path(folder) / TRACKER).is_file():
        raise CheckpointError(
            f"expected a checkpoint of Megatron in {folder}, which it loads after the model is built, found no "
            f"{TRACKER}: convert_hf_to_mg writes one; or pass load_weights=True and set megatron.load to None"
        )
    files = find_rank_files(Path(folder))
    if files is None:
        return
    if is_hybrid(chunk):
        raise CheckpointError(
            f"{folder} has a file for each rank, with the names of a GPTModel. Megatron cannot load it into this "
            'HybridModel: pass load_weights=True and have megatron.load None, or use model="gpt"'
        )
    path = files / _folder_of_this_rank(dims) / NAME
    if not path.is_file():
        raise CheckpointError(f"expected {path} for this rank of {dims}, found none: convert it for this mesh")
    stored = _shapes(read_rank_file(path).get(chunk_of(dims, vp_stage), {}), head)
    wanted = _shapes(chunk.state_dict(), head)
    # A file of a tied model may have an output layer, which the model does not need.
    names = {*wanted, *(name for name in stored if not name.startswith("output_layer."))}
    differ = sorted(name for name in names if stored.get(name) != wanted.get(name))
    if differ:
        shapes = "; ".join(
            f"{name}: expected {wanted.get(name)}, found {stored.get(name)}" for name in differ[:_NUM_NAMED]
        )
        raise CheckpointError(
            f"{path} must hold the parameters of this model, and {len(differ)} differ, which Megatron would leave at "
            f"random values without an error: {shapes}. Convert it for this mesh, and with the names of this backend "
            "(grouped_gemm and te_ln_* of the convertor's block)"
        )


def _shapes(state: Mapping[str, Tensor | None], head: str) -> dict[str, tuple[int, ...]]:
    """The shapes to compare: of parameters and buffers that both sides may have."""
    tensors = {name: tensor for name, tensor in state.items() if tensor is not None and not name.endswith(SUFFIX)}
    left_out = () if head == "lm" else ("output_layer.",)
    return {name: tuple(tensor.shape) for name, tensor in tensors.items() if not name.startswith(left_out)}


def _folder_of_this_rank(dims: ParallelDims) -> str:
    from megatron.core import parallel_state

    return folder_of(
        dims,
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
    )
