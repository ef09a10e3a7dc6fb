"""The arguments of ``GPTModel`` for callers who build it themselves: its config, its sizes and its layer specs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from mcore_bridge.arguments import WHOLE, require
from mcore_bridge.config.mesh.parallel_dims import ParallelDims
from mcore_bridge.errors import MeshError
from mcore_bridge.factory.blueprint import BuildOptions, Overrides, make_blueprint
from mcore_bridge.rules.dtypes import DtypeLike

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from transformers import PretrainedConfig


def to_transformer_config(
    hf: str | os.PathLike[str] | PretrainedConfig,
    *,
    dims: ParallelDims | None = None,
    dtype: DtypeLike = torch.bfloat16,
    overrides: Overrides | None = None,
    strict_config: bool = False,
) -> TransformerConfig:
    """The ``TransformerConfig`` of an HF model. Needs no process group.

    Args:
        hf: a folder, the name of a repository in the local hub cache, or a config.
        dims: the mesh. None: a single rank.
        dtype: the dtype of the parameters, as for ``build_model``.
        overrides: ``TransformerConfig`` fields and ``GPTModel`` arguments by name, as for ``build_model``.
        strict_config: refuse fields that the architecture does not claim, even if no code of transformers reads them.

    Returns:
        The config that ``build_model`` would pass to ``GPTModel``.

    Raises:
        ConfigError: the config or an override cannot be expressed exactly.
        MeshError: ``dims`` do not fit this model.

    Example:
        >>> config = mb.to_transformer_config("path/of/Qwen3-8B", dims=mb.ParallelDims(tp=2))
        >>> config.num_layers, config.num_query_groups, config.tensor_model_parallel_size
        (4, 4, 2)
    """
    mesh = dims or ParallelDims()
    options = BuildOptions(dims=mesh, dtype=dtype, overrides=overrides, strict_config=strict_config)
    return make_blueprint(hf, options).config


def to_gpt_arguments(
    hf: str | os.PathLike[str] | PretrainedConfig,
    *,
    dims: ParallelDims | None = None,
    head: str = "lm",
    overrides: Overrides | None = None,
) -> dict[str, object]:
    """The arguments of ``GPTModel`` that the HF config decides, by name. Needs no process group.

    Args:
        hf, dims, overrides: see ``to_transformer_config``.
        head: "lm", "value", "classification", "process_reward" or "none".

    Returns:
        Values by the names of ``GPTModel``'s arguments.

    Raises:
        ConfigError, MeshError: as for ``to_transformer_config``.

    Example:
        >>> arguments = mb.to_gpt_arguments("path/of/Qwen3-8B")
        >>> arguments["vocab_size"], arguments["position_embedding_type"]
        (96, 'rope')
    """
    options = BuildOptions(dims=dims or ParallelDims(), head=head, overrides=overrides)
    return dict(make_blueprint(hf, options).gpt_arguments)


def to_layer_spec(
    hf: str | os.PathLike[str] | PretrainedConfig,
    *,
    dims: ParallelDims | None = None,
    dtype: DtypeLike = torch.bfloat16,
    backend: str = "auto",
    overrides: Overrides | None = None,
    pp_rank: int = 0,
    vp_stage: int | None = None,
) -> TransformerBlockSubmodules:
    """The layer specs and the final norm of one pipeline stage, to pass to ``GPTModel``. Needs no process group.

    Args:
        hf, dims, dtype, overrides: see ``to_transformer_config``.
        backend: "te" (TransformerEngine), "torch", or "auto": "te" if it is installed and there is CUDA.
        pp_rank: the pipeline rank of the stage.
        vp_stage: the index of the stage on its rank. None: the first.

    Returns:
        The layer specs of the stage and its final norm.

    Raises:
        ConfigError: as for ``to_transformer_config``, or the backend is unknown or not installed.
        MeshError: ``dims`` do not fit this model, or have no such stage.

    Example:
        >>> spec = mb.to_layer_spec("path/of/Qwen3-8B", dims=mb.ParallelDims(pp=2), pp_rank=1)
        >>> len(spec.layer_specs)                         # of the four layers
        2
    """
    require(MeshError, pp_rank=(pp_rank, WHOLE), vp_stage=(vp_stage, WHOLE.or_none()))
    options = BuildOptions(dims=dims or ParallelDims(), dtype=dtype, backend=backend, overrides=overrides)
    blueprint = make_blueprint(hf, options)
    for stage in blueprint.stages:
        if (stage.pp_rank, stage.vp_stage) == (pp_rank, vp_stage or 0):
            return blueprint.block_spec(stage.layers)
    raise MeshError(
        f"pp_rank and vp_stage must name one of the {len(blueprint.stages)} stages of {dims}, found pp_rank={pp_rank}, "
        f"vp_stage={vp_stage}: pass the stage that this rank builds"
    )
