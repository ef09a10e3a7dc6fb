"""A blueprint is all that is decided about a model before any of it is built, and the views of it that users ask for.

Pure: drawing one checks config, mesh, backend and head against each other and needs no process group. Whoever holds one
may change its config in place until the model is built (``reconcile.py``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mcore_bridge.architecture import Architecture, architecture_of
from mcore_bridge.config import transformer
from mcore_bridge.config.effective import effective
from mcore_bridge.config.mesh.parallel_dims import ParallelDims
from mcore_bridge.config.mesh.pipeline import Stage
from mcore_bridge.config.unread import require_no_unread, unread_fields
from mcore_bridge.errors import ConfigError, MeshError
from mcore_bridge.factory import layer_specs
from mcore_bridge.factory.modules.backend import Backend, choose_backend, kernels_of
from mcore_bridge.factory.modules.heads import check_head
from mcore_bridge.factory.mtp import mtp_block_spec
from mcore_bridge.factory.param_count import resolve_layout
from mcore_bridge.weights.provenance import Provenance, provenance_of

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from transformers import PretrainedConfig

Overrides = Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """What ``build_model`` builds from; ``dims`` have an explicit layout where "balanced" was asked for.

    ``unread`` are fields of the HF config that change nothing (``config.unread``).
    ``drawn`` is what stood on the config when it was drawn, ``overrides`` are what was asked for, and ``origin`` is the
    HF config without them: a copy of the caller's.
    """

    origin: PretrainedConfig
    provenance: Provenance
    architecture: Architecture
    dims: ParallelDims
    dtype: torch.dtype
    device: torch.device
    backend: Backend
    config: TransformerConfig
    gpt_arguments: Mapping[str, object]
    overrides: Overrides
    drawn: Mapping[str, object]
    unread: tuple[str, ...]

    @property
    def stages(self) -> tuple[Stage, ...]:
        """All stages of the pipeline, in the order of execution."""
        return self.dims.stages(self.config.num_layers)

    @property
    def hf(self) -> PretrainedConfig:
        """The HF config, with what overrides have changed in it."""
        return self.provenance.hf

    def vp_stage(self, stage: Stage) -> int | None:
        """mcore's number of a virtual stage: None where there is only one per rank."""
        return stage.vp_stage if self.dims.vp > 1 else None

    def block_spec(self, stage: Stage) -> TransformerBlockSubmodules:
        """The layers of a stage and the norm after the last one."""
        layer_spec = self.architecture.layer_spec or layer_specs.block_spec
        spec: TransformerBlockSubmodules = layer_spec(self.config, stage.layers, backend=self.backend)
        return spec

    def mtp_block_spec(self, stage: Stage) -> Any:
        """The MTP layers of a stage, or None. They are like the last decoder layer."""
        explicit = self.dims.layout is not None
        wanted = stage.num_mtp_layers if explicit else (self.config.mtp_num_layers or 0) * stage.loss
        if wanted == 0:
            return None
        layer_spec = self.architecture.layer_spec or layer_specs.block_spec
        last = range(self.config.num_layers - 1, self.config.num_layers)
        inner = layer_spec(self.config, last, backend=self.backend).layer_specs[0]
        return mtp_block_spec(inner, wanted, backend=self.backend)

    def __str__(self) -> str:
        """For the log; the mesh says itself what it is."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype} on {self.device}, backend {self.backend}, head {self.provenance.head}"


def make_blueprint(
    hf: str | os.PathLike[str] | PretrainedConfig,
    *,
    dims: ParallelDims,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
    backend: str = "auto",
    head: str = "lm",
    overrides: Overrides | None = None,
    strict_config: bool = False,
) -> Blueprint:
    """Decide and check everything about a model. Arguments and errors are those of ``build_model``."""
    check_head(head)
    _require_types(dims, overrides)
    provenance = provenance_of(hf, head=head)
    origin = provenance.hf
    architecture = architecture_of(origin)
    if architecture.megatron_core is not None:
        architecture.megatron_core.require(architecture.model_type)
    if strict_config:
        require_no_unread(origin, architecture.fields)
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    chosen = choose_backend(backend, device=device)
    found = effective(origin, architecture.fields, tp=dims.tp, overrides=overrides or {})
    provenance = provenance.with_overridden(found.fields)
    hf = provenance.hf
    num_mtp_layers = (overrides or {}).get("mtp_num_layers") or 0
    assert isinstance(num_mtp_layers, int)
    if num_mtp_layers and head != "lm":
        raise ConfigError(
            f"MTP layers predict tokens, and a model with head={head!r} has none to predict: build without"
        )
    _check_mtp(provenance, num_mtp_layers)
    dims = resolve_layout(dims, hf, dtype=dtype, head=head, num_mtp_layers=num_mtp_layers)
    chosen_fields = {**kernels_of(chosen), **_interleaved(dims, found.free)}
    table = architecture.fields
    config = transformer.to_transformer_config(hf, table, dims=dims, dtype=dtype, overrides=chosen_fields)
    gpt_arguments = transformer.to_gpt_arguments(hf, table, dims=dims, overrides=chosen_fields)
    if head != "lm":
        gpt_arguments["share_embeddings_and_output_weights"] = False
    return Blueprint(
        origin=origin,
        provenance=provenance,
        architecture=architecture,
        dims=dims,
        dtype=dtype,
        device=device,
        backend=chosen,
        config=config,
        gpt_arguments=gpt_arguments,
        overrides=dict(overrides or {}),
        drawn=dict(vars(config)),
        unread=unread_fields(origin, architecture.fields),
    )


def _require_types(dims: object, overrides: object) -> None:
    """Before anything is read off arguments of another type."""
    if not isinstance(dims, ParallelDims):
        raise ConfigError(f"dims must be a ParallelDims, found {dims!r}: write dims=ParallelDims(tp=2, ...)")
    if not isinstance(overrides, Mapping | None) or any(not isinstance(name, str) for name in overrides or ()):
        raise ConfigError(
            "overrides must be a mapping of names to values, such as {'attention_dropout': 0.1}, found "
            f"{overrides!r}: write it so"
        )


def _check_mtp(provenance: Provenance, wanted: int) -> None:
    """Before a model is built whose MTP layers have no names in HF."""
    counts = {rule.count for rule in provenance.rules if rule.mcore.startswith("mtp.layers.*")}
    known = min((count for count in counts if count is not None), default=wanted if counts else 0)
    if wanted > known:
        raise ConfigError(
            f"mtp_num_layers={wanted} must be at most {known}, as many MTP layers as {provenance.hf.model_type} has "
            "names for with this HF config: remove the override, or say in the HF config how many a checkpoint holds"
        )


def _interleaved(dims: ParallelDims, overrides: Overrides | None) -> Overrides:
    """At pp=2 the next rank is the previous one, and batched messages of the two directions would change places."""
    if dims.vp == 1:
        return overrides or {}
    chosen = {"overlap_p2p_comm": True, "batch_p2p_comm": False, **(overrides or {})}
    if dims.pp == 2 and not chosen["overlap_p2p_comm"]:
        raise MeshError("overlap_p2p_comm must be True at pp=2, vp>1: megatron-core would confuse messages; remove it")
    return chosen


def to_transformer_config(
    hf: str | os.PathLike[str] | PretrainedConfig,
    *,
    dims: ParallelDims | None = None,
    dtype: torch.dtype = torch.bfloat16,
    overrides: Overrides | None = None,
    strict_config: bool = False,
) -> TransformerConfig:
    """The ``TransformerConfig`` of an HF model. Needs no process group.

    Args:
        hf: a folder, the name of a repository in the local hub cache, or a config.
        dims: the mesh; None is a single rank.
        dtype: of the parameters: float32, bfloat16 or float16.
        overrides: any ``TransformerConfig`` field or ``GPTModel`` argument, as for ``build_model``.
        strict_config: refuse fields that the architecture does not know, though no code of transformers reads them.

    Raises:
        ConfigError: the config or an override cannot be expressed exactly.
        MeshError: ``dims`` do not fit this model.
    """
    return make_blueprint(
        hf, dims=dims or ParallelDims(), dtype=dtype, overrides=overrides, strict_config=strict_config
    ).config


def to_gpt_arguments(
    hf: str | os.PathLike[str] | PretrainedConfig,
    *,
    dims: ParallelDims | None = None,
    head: str = "lm",
    overrides: Overrides | None = None,
) -> dict[str, object]:
    """The arguments of ``GPTModel`` that the HF config decides. Arguments and errors: ``to_transformer_config``."""
    drawn = make_blueprint(hf, dims=dims or ParallelDims(), dtype=torch.bfloat16, head=head, overrides=overrides)
    return dict(drawn.gpt_arguments)


def to_layer_spec(
    hf: str | os.PathLike[str] | PretrainedConfig,
    *,
    dims: ParallelDims | None = None,
    dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
    overrides: Overrides | None = None,
    pp_rank: int = 0,
    vp_stage: int | None = None,
) -> TransformerBlockSubmodules:
    """The layers and the final norm of one pipeline stage, to pass to ``GPTModel``. Needs no process group.

    Args:
        hf, dims, dtype, overrides: see ``to_transformer_config``.
        backend: "te" (TransformerEngine), "torch", or "auto": "te" where it is installed and there is CUDA.
        pp_rank: the stage's pipeline rank.
        vp_stage: the stage's number among those of its rank; None is the first.

    Raises:
        ConfigError: as for ``to_transformer_config``, or the backend is unknown or not installed.
        MeshError: ``dims`` do not fit this model, or have no such stage.
    """
    drawn = make_blueprint(hf, dims=dims or ParallelDims(), dtype=dtype, backend=backend, overrides=overrides)
    for stage in drawn.stages:
        if (stage.pp_rank, stage.vp_stage) == (pp_rank, vp_stage or 0):
            return drawn.block_spec(stage)
    raise MeshError(f"pp_rank={pp_rank}, vp_stage={vp_stage} must name one of the {len(drawn.stages)} stages of {dims}")
