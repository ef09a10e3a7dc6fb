"""``build_model``: all is checked before anything is built, and every chunk that is built is returned.

Some trainers hook into constructors, so each chunk is built exactly once, in the order of the virtual stages.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from mcore_bridge.config.mesh.parallel_dims import ParallelDims
from mcore_bridge.config.mesh.pipeline import Stage
from mcore_bridge.config.mesh.process_groups import differing
from mcore_bridge.config.unread import notes_on
from mcore_bridge.errors import ConfigError, MeshError
from mcore_bridge.factory.blueprint import (
    Blueprint,
    Overrides,
    make_blueprint,
    to_gpt_arguments,
    to_layer_spec,
    to_transformer_config,
)
from mcore_bridge.factory.chunk import build_chunk, building
from mcore_bridge.factory.freeze import freeze_parameters, require_patterns
from mcore_bridge.factory.param_count import count_params
from mcore_bridge.factory.reconcile import reconcile
from mcore_bridge.weights.load import Source, load_hf_weights

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from transformers import PretrainedConfig

__all__ = ["build_model", "to_gpt_arguments", "to_layer_spec", "to_transformer_config"]

logger = logging.getLogger("mcore_bridge")


def build_model(
    hf: str | os.PathLike[str] | PretrainedConfig,
    *,
    dims: ParallelDims | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    backend: str = "auto",
    head: str = "lm",
    overrides: Overrides | None = None,
    load_weights: bool | Source = True,
    freeze: Sequence[str] = (),
    on_chunk: Callable[[GPTModel, int], None] | None = None,
    seed: int = 0,
    strict_config: bool = False,
) -> list[GPTModel]:
    """Build this rank's part of an HF model: bare ``GPTModel``s of megatron-core, one per virtual pipeline stage.

    Args:
        hf: a folder, the name of a repository in the local hub cache, or a config.
        dims: the mesh, as ``parallel_state`` was initialised; None reads it from there (without sequence parallelism).
        dtype: of all parameters, the norms included: float32, bfloat16 or float16. Weights are cast to it.
        device: of the parameters; "meta" gives a model without storage. None is this process's CUDA device, else CPU.
        backend: "te" (TransformerEngine), "torch" (runs anywhere), or "auto": "te" where it is installed, on CUDA.
        head: "lm", "value" (one fp32 number per token) or "classification" (``hf.num_labels`` fp32 numbers).
        overrides: any ``TransformerConfig`` field or ``GPTModel`` argument, applied last. Those that the HF config
            decides change it as well, in what a save writes too; where HF has no way to say one, it raises.
        load_weights: True loads from the folder ``hf``; a folder, mapping or iterable of pairs loads from there; False
            leaves megatron-core's initial values, drawn from ``seed``.
        freeze: ``fnmatch`` patterns of canonical parameter names, such as "embedding.*".
        on_chunk: called with each chunk and its virtual stage, last: loaded, frozen and not wrapped yet.
        seed: of everything that is drawn: the initial values, or a head that the source lacks.
        strict_config: refuse fields of the HF config that the architecture does not know. Otherwise those that no code
            of transformers reads for this family are accepted, and named in the log.

    Returns:
        The chunks by virtual stage. Each notes in ``chunk.bridge`` where it comes from.

    Raises:
        ConfigError: the config, an override, the backend or the head cannot be built exactly.
        MeshError: ``dims`` fit neither this model nor what ``parallel_state`` says.
        CheckpointError: the weights do not fit the model.
    """
    blueprint = make_blueprint(
        hf,
        dims=dims or _mesh(),
        dtype=dtype,
        device=device,
        backend=backend,
        head=head,
        overrides=overrides,
        strict_config=strict_config,
    )
    chunks = build(blueprint, _source(hf, load_weights, blueprint.device), freeze=freeze, seed=seed)
    for index, chunk in enumerate(chunks):
        if on_chunk is not None:
            on_chunk(chunk, index)
    return chunks


def build(blueprint: Blueprint, source: Source | None, *, freeze: Sequence[str] = (), seed: int = 0) -> list[GPTModel]:
    """``build_model`` once all is decided: this rank's chunks, with the blueprint's own config as theirs.

    Args:
        blueprint: from ``make_blueprint``. What has been changed on its config since then is checked as overrides are.
        source: of the weights; None leaves megatron-core's initial values.
        freeze, seed: see ``build_model``, as for the errors.
    """
    require_patterns(freeze)
    blueprint = reconcile(blueprint)
    _require_mesh(blueprint, _mesh())
    stages = own_stages(blueprint)
    with building(blueprint, seed=seed, initialise=source is None):
        chunks = [build_chunk(blueprint, stage, seed=seed) for stage in stages]
    if source is not None:
        load_hf_weights(chunks, source, dtype=blueprint.dtype)
    freeze_parameters(chunks, freeze)
    _log(blueprint, chunks)
    return chunks


def _mesh() -> ParallelDims:
    """The mesh of this process."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        raise MeshError("build_model needs megatron's process groups; call dims.initialize() or initialise them first")
    return ParallelDims.from_mcore()


def _require_mesh(blueprint: Blueprint, mesh: ParallelDims) -> None:
    """What the groups of this process are, the model must be cut for. Experts count only where there are some."""
    experts = ("ep", "etp") if blueprint.config.num_moe_experts else ()
    names = ("tp", "pp", "vp", "cp", "hierarchical_context_parallel_sizes", *experts)
    if differ := differing(*({name: getattr(dims, name) for name in names} for dims in (blueprint.dims, mesh))):
        raise MeshError(f"dims must be the mesh of parallel_state; sizes of the latter, and those of dims: {differ}")


def _source(
    hf: str | os.PathLike[str] | PretrainedConfig, load_weights: bool | Source, device: torch.device
) -> Source | None:
    if load_weights is False:
        return None
    if device.type == "meta":
        raise ConfigError("a model on the meta device has no storage to load into; pass load_weights=False")
    if load_weights is not True:
        return load_weights
    if not isinstance(hf, str | os.PathLike):
        raise ConfigError(
            "load_weights=True needs the folder of the weights, but hf is a config; pass load_weights=FOLDER, a "
            "mapping of tensors, or False"
        )
    return hf


def own_stages(blueprint: Blueprint) -> list[Stage]:
    """This rank's stages by virtual stage."""
    from megatron.core import parallel_state

    rank = parallel_state.get_pipeline_model_parallel_rank()
    return [stage for stage in blueprint.stages if stage.pp_rank == rank]


def _log(blueprint: Blueprint, chunks: Sequence[GPTModel]) -> None:
    """One line, from rank 0, and what fields of the HF config were passed over."""
    if torch.distributed.get_rank() != 0:
        return
    for level, note in notes_on(blueprint.unread):
        logger.log(level, note)
    if not logger.isEnabledFor(logging.INFO):
        return
    try:
        total = f"{count_params(blueprint.hf).total:,}"
    except ConfigError:  # overrides may make a config possible that is not by itself
        total = "an unknown number of"
    here = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
    world_size = torch.distributed.get_world_size()
    logger.info(
        "built %s: %s parameters, %s on this rank; %s; %s",
        *(blueprint.hf.model_type, total, f"{here:,}", blueprint),
        blueprint.dims.describe(world_size=world_size, num_layers=blueprint.config.num_layers),
    )
