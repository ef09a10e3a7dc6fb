"""Blueprints: all decisions about a model before it is built.

``BuildOptions`` are the arguments of a build besides the HF config: mesh, dtype, device, modules, head and overrides.
``make_blueprint`` checks config, options, mesh and backend against each other. It needs no process group.

A trainer may change the blueprint's config in place before the model is built. ``reconcile`` then treats a changed
field like an override: the field passes the checks of overrides, and values that follow from it are set on the same
config object. Attributes that neither megatron-core nor this library has stay unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from mcore_bridge.architecture import Architecture, architecture_of
from mcore_bridge.arguments import FLAG, Kind, accepts_former_names, instance_of, require
from mcore_bridge.composite import levels_of
from mcore_bridge.config import transformer
from mcore_bridge.config.apply_overrides import effective
from mcore_bridge.config.fields import to_mcore
from mcore_bridge.config.layer_kinds import held_mtp_layers
from mcore_bridge.config.mesh.parallel_dims import ParallelDims
from mcore_bridge.config.mesh.pipeline import Stage
from mcore_bridge.config.overrides import gpt_argument_names
from mcore_bridge.config.unread_fields import require_no_unread, unread_fields, without_unread
from mcore_bridge.errors import ConfigError, MeshError
from mcore_bridge.factory.hybrid_support import check_model, require_hybrid
from mcore_bridge.factory.modules.backend import Backend, choose_backend, kernels_of, require_quantizable
from mcore_bridge.factory.mtp_specs import count_mtp, inner_spec, mtp_block_spec, multiplies_hidden_first, require_mtp
from mcore_bridge.factory.param_count import ParamCounts, count_params, resolve_layout
from mcore_bridge.factory.vision.deepstack import count_features, require_layers
from mcore_bridge.factory.vision.tower import require_tower, tower_specs
from mcore_bridge.rules.dtypes import AUTO, DtypeLike, as_dtype
from mcore_bridge.rules.variants import check_head
from mcore_bridge.weights.provenance import Provenance, provenance_of

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from transformers import PretrainedConfig


Overrides = Mapping[str, object]
"""Values by name: fields of ``TransformerConfig``, and arguments of ``GPTModel``."""
_MESH = instance_of("a ParallelDims", ParallelDims, advice="write dims=ParallelDims(tp=2, ...)")
_OVERRIDES = Kind(
    "a mapping of names to values, such as {'attention_dropout': 0.1}",
    lambda value: isinstance(value, Mapping | None) and all(isinstance(name, str) for name in value or ()),
    "pass such a mapping",
)


@accepts_former_names
@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """Arguments of ``build_model`` by their names, with their defaults. ``make_blueprint`` checks their values."""

    dims: ParallelDims = field(default_factory=ParallelDims)
    dtype: DtypeLike = torch.bfloat16
    device: torch.device | str | None = None
    backend: str = "auto"
    head: str = "lm"
    overrides: Overrides | None = None
    strict_config: bool = False
    vision: str = "text_only"
    model: str = "gpt"


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """Everything that ``build_model`` needs.

    ``options`` are the caller's, but an explicit layout has replaced "balanced" in ``dims``, and a dtype its name.
    ``device`` and ``backend`` are never "auto". ``unread`` are fields of the HF config without effect
    (``config.unread_fields``). ``origin`` is a copy of the caller's HF config, without overrides. ``initial`` are the
    first values of ``config``, to detect later changes.
    """

    origin: PretrainedConfig
    provenance: Provenance
    architecture: Architecture
    options: BuildOptions
    device: torch.device
    backend: Backend
    config: TransformerConfig
    gpt_arguments: Mapping[str, object]
    initial: Mapping[str, object]
    unread: tuple[str, ...]

    @property
    def dims(self) -> ParallelDims:
        """The mesh, with an explicit layout."""
        return self.options.dims

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of parameters."""
        dtype = self.options.dtype
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def overrides(self) -> Overrides:
        """The overrides, by name; empty if there are none."""
        return self.options.overrides or {}

    @property
    def stages(self) -> tuple[Stage, ...]:
        """All pipeline stages in execution order."""
        return self.dims.stages(self.config.num_layers)

    @property
    def source(self) -> str | PretrainedConfig:
        """The folder of the checkpoint, or the config without overrides."""
        return self.provenance.folder or replace(self.provenance, hf=self.origin).config

    @property
    def hf(self) -> PretrainedConfig:
        """The HF config with overrides."""
        return self.provenance.hf

    @property
    def counts(self) -> ParamCounts:
        """The numbers of its parameters, including its tower if it has one."""
        counts = count_params(self.hf, tower=self.provenance.tower)
        return counts if self.provenance.head == "lm" else replace(counts, lm_head=0)

    def vp_stage(self, stage: Stage) -> int | None:
        """The virtual stage as mcore wants it: None if each rank has only one."""
        return stage.vp_stage if self.dims.vp > 1 else None

    def block_spec(self, layers: range) -> TransformerBlockSubmodules:
        """The specs of some layers, numbered (from 0) in the whole model, and the final norm."""
        spec: TransformerBlockSubmodules = self._layer_spec()(self.config, layers, backend=self.backend)
        return spec

    def _layer_spec(self) -> Callable[..., Any]:
        """The function that makes layer specs."""
        from mcore_bridge.factory.layer_specs import block_spec

        return self.architecture.layer_spec or block_spec

    def mtp_layers(self, stage: Stage) -> int:
        """How many MTP layers a stage holds: all, or none."""
        held_here = stage.loss if self.dims.layout is None else stage.num_mtp_layers > 0
        return held_mtp_layers(vars(self.config)) * held_here

    def inner_spec(self) -> Any:
        """A new spec of the layer within an MTP layer."""
        return inner_spec(self.config, self._layer_spec(), backend=self.backend)

    def mtp_block_spec(self, stage: Stage) -> Any:
        """The spec of a stage's MTP layers; None if it has none."""
        held = self.mtp_layers(stage)
        if not held:
            return None
        hidden_first = multiplies_hidden_first(self.provenance)
        return mtp_block_spec(
            self.inner_spec(), held, config=self.config, backend=self.backend, hidden_first=hidden_first
        )

    def __str__(self) -> str:
        """A description for the log, without the mesh."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype} on {self.device}, backend {self.backend}, head {self.provenance.head}"


def make_blueprint(hf: str | os.PathLike[str] | PretrainedConfig | Provenance, options: BuildOptions) -> Blueprint:
    """Decide and check everything about a model. Options and errors: see ``build_model``.

    To plan many meshes of one model, pass a provenance with this head in place of ``hf``: then the folder is not read
    again. If it has a tower, it must fit ``vision`` and ``dtype``; then no tower is built to list its tensors.
    """
    dims, head, vision = options.dims, options.head, options.vision
    check_head(head)
    check_model(options.model)
    require(
        ConfigError,
        dims=(dims, _MESH),
        overrides=(options.overrides, _OVERRIDES),
        strict_config=(options.strict_config, FLAG),
    )
    overrides = dict(options.overrides or {})
    provenance = hf if isinstance(hf, Provenance) else provenance_of(hf, head=head)
    origin, dtype = provenance.hf, _model_dtype(options.dtype, provenance.config)
    architecture = architecture_of(origin)
    _require_release(architecture, origin)
    read_by = [(origin, architecture.fields)]
    require_tower((whole := provenance.whole), vision)
    if whole is not None:
        read_by += [(level, whole.composite.fields) for level in levels_of(whole.config, whole.composite)]
    if options.strict_config:
        require_no_unread(read_by)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {str(device)!r} needs a GPU, and torch.cuda.is_available() is False: use 'cpu'")
    chosen = choose_backend(options.backend, device=device)
    mtp = count_mtp(overrides, head=head)
    changed = effective(origin, architecture.fields, tp=dims.tp, overrides=overrides)
    provenance = provenance.with_overridden(changed.fields)
    hf = provenance.hf
    if whole is not None and vision != "text_only" and not provenance.tower:
        provenance = provenance.seeing(vision, tower_specs(whole, dtype))
    features = count_features(whole) if whole is not None and provenance.tower else 0
    dims = resolve_layout(dims, hf, dtype=dtype, head=head, mtp=mtp, tower=provenance.tower, at_first=features)
    require_quantizable(overrides, chosen, device)
    chosen_fields = {**kernels_of(chosen), **_interleaved(dims, changed.free)}
    table = architecture.fields
    config = transformer.to_transformer_config(hf, table, dims=dims, dtype=dtype, overrides=chosen_fields)
    require_layers(features, dims.stages(config.num_layers)[0])
    require_mtp(provenance, config)
    gpt_arguments = transformer.to_gpt_arguments(hf, table, dims=dims, overrides=chosen_fields)
    if head != "lm":
        gpt_arguments["share_embeddings_and_output_weights"] = False
    if options.model == "hybrid":
        positions = gpt_arguments["position_embedding_type"]
        require_hybrid(architecture, config, positions=positions, vision=vision)
    return Blueprint(
        origin=origin,
        provenance=provenance,
        architecture=architecture,
        options=replace(options, dims=dims, dtype=dtype, overrides=overrides),
        device=device,
        backend=chosen,
        config=config,
        gpt_arguments=gpt_arguments,
        initial=dict(vars(config)),
        unread=tuple(name for own, table in read_by for name in unread_fields(own, table)),
    )


def _model_dtype(dtype: DtypeLike, hf: PretrainedConfig) -> torch.dtype:
    """The dtype of a model. A name stands for its dtype, and "auto" for the dtype in the HF config, or else bfloat16.

    Raises:
        ConfigError: megatron-core builds no model in this dtype.
    """
    published = getattr(hf, "dtype", None)
    chosen = (published or torch.bfloat16) if dtype == AUTO else as_dtype(dtype)
    if not isinstance(chosen, torch.dtype) or chosen not in transformer.BUILDABLE:
        of_config = " in the HF config" * (dtype == AUTO)
        raise ConfigError(
            f'dtype must be float32, bfloat16 or float16, or "auto", found {chosen!r}{of_config}: pass one of them'
        )
    return chosen


def _require_release(architecture: Architecture, hf: PretrainedConfig) -> None:
    """Raise ``ConfigError`` if megatron-core is too old for a family, with all other faults of the config."""
    release, table = architecture.megatron_core, architecture.fields
    if release is None or release.is_installed:
        return
    try:
        to_mcore(table, without_unread(hf, table))
    except ConfigError as error:
        release.require(architecture.model_type, f"\n{error}")
    release.require(architecture.model_type)


def _interleaved(dims: ParallelDims, overrides: Overrides) -> Overrides:
    """Overrides with our defaults for virtual stages.

    At pp=2 the next rank is also the previous one. Batched messages of the two directions could then be swapped.
    """
    if dims.vp == 1:
        return overrides
    chosen = {"overlap_p2p_comm": True, "batch_p2p_comm": False, **overrides}
    if dims.pp == 2 and not chosen["overlap_p2p_comm"]:
        raise MeshError(
            "overlap_p2p_comm must be True at pp=2 with vp > 1, found False: megatron-core would swap messages. Remove "
            "the override"
        )
    return chosen


_SPECS = frozenset({"transformer_layer_spec", "mtp_block_spec"})


def reconcile(blueprint: Blueprint, *, overrides: Overrides | None = None, **changed: Any) -> Blueprint:
    """The blueprint for the changed config. It keeps the config object.

    Args:
        blueprint: from ``make_blueprint``, or from this function.
        overrides: the changes of the config. None: the result of ``changes_of``.
        changed: other build options. None: the options of the blueprint.

    Raises:
        ConfigError, MeshError: as for ``make_blueprint``.
    """
    changes = changes_of(blueprint) if overrides is None else overrides
    options = replace(blueprint.options, **{name: value for name, value in changed.items() if value is not None})
    if not changes and options == blueprint.options:
        return blueprint
    options = replace(
        options,
        device=blueprint.device,
        backend=changed.get("backend") or blueprint.backend,
        overrides={**blueprint.overrides, **changes},
        strict_config=False,
    )
    settled = make_blueprint(blueprint.source, options)
    held = vars(blueprint.config)
    held.update(vars(settled.config))
    held.update({name: value for name, value in settled.gpt_arguments.items() if name in held})
    return replace(settled, config=blueprint.config)


def changes_of(blueprint: Blueprint) -> dict[str, object]:
    """Values that were set on the config after it was made: fields, ``GPTModel`` arguments, our attributes, specs."""
    before = {**blueprint.initial, **blueprint.gpt_arguments}
    names = before.keys() | gpt_argument_names() | _SPECS
    now = {name: value for name, value in vars(blueprint.config).items() if name in names}
    return {name: value for name, value in now.items() if name not in before or _differ(value, before[name])}


def _differ(value: object, before: object) -> bool:
    return value is not before and value != before
