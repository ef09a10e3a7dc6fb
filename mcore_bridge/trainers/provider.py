"""Megatron-Bridge's model provider: a ``TransformerConfig`` that a trainer may change until the model is built.

Unchanged fields follow the HF config. A changed field sets the mesh, the dtype, or an override.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from megatron.core import parallel_state
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from torch import nn

from mcore_bridge.config.layer_kinds import SizedByLayer, sized_by_layer
from mcore_bridge.config.mesh.parallel_dims import ParallelDims
from mcore_bridge.config.mesh.pipeline import Stage
from mcore_bridge.config.overrides import config_class, require_overridable
from mcore_bridge.errors import ConfigError, MeshError
from mcore_bridge.factory.blueprint import Blueprint, changes_of, reconcile
from mcore_bridge.factory.build import build, own_stages
from mcore_bridge.factory.chunk import build_chunk, building
from mcore_bridge.trainers.settings import parts_to_freeze, settle_same, split, with_mtp_layers
from mcore_bridge.trainers.wrap import ddp_config_of, require_value_head, wrap
from mcore_bridge.weights.load import load_hf_weights
from mcore_bridge.weights.source.source import HFWeights

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel

Hook = Callable[[list[nn.Module]], Sequence[nn.Module] | None]
"""A function that is called with this rank's bare chunks before they are wrapped. It may return other chunks."""


def modelopt_transformer_layer_spec(config: object) -> NoReturn:
    """Stands for layers that ModelOpt can quantize, as ``transformer_layer_spec``: torch's modules, which it knows.

    Raises:
        ConfigError: always, since a provider makes its layers itself.
    """
    raise ConfigError(
        "modelopt_transformer_layer_spec makes no layers: set it as transformer_layer_spec of a provider, which then "
        "builds layers of torch's modules"
    )


class ValueHead:
    """A hook whose presence makes the build use a value head. It refuses a model without a value head."""

    def __call__(self, chunks: Sequence[nn.Module]) -> None:
        require_value_head(chunks if isinstance(chunks, Sequence) else [chunks])


class Provider(TransformerConfig):
    """The config of a model that is not built yet, with the arguments of ``GPTModel`` as further attributes.

    Attributes:
        vision, model: as for ``build_model``.
        freeze_language_model: whether everything except a tower is frozen.
        freeze_vision_model: whether a tower is frozen, except its connection to the text.
        freeze_vision_projection: whether this connection is frozen.
    """

    vision: str = "text_only"
    model: str = "gpt"
    freeze_language_model: bool = False
    freeze_vision_model: bool = False
    freeze_vision_projection: bool = False

    _blueprint: Blueprint
    _source: HFWeights | None
    _hooks: list[Hook]

    @classmethod
    def of(cls, blueprint: Blueprint, source: HFWeights | None) -> Provider:
        """Make a provider that replaces the config of ``blueprint``, and loads its model from ``source``."""
        kind = LatentProvider if isinstance(blueprint.config, MLATransformerConfig) else Provider
        is_sized = isinstance(blueprint.config, SizedByLayer)
        provider: Provider = object.__new__(sized_by_layer(kind) if is_sized else kind)
        provider.__dict__.update({**vars(blueprint.config), **blueprint.gpt_arguments})
        # None means the size in parallel_state, or the tensor parallel size
        provider.expert_tensor_parallel_size = None
        provider._blueprint = replace(blueprint, config=provider)
        provider._source, provider._hooks = source, []
        return provider

    def register_pre_wrap_hook(self, hook: Hook) -> None:
        """Register a hook, which is called with the bare chunks before they are wrapped, after earlier hooks."""
        self._hooks.append(hook)

    def apply_overrides_and_finalize(
        self, dtype: torch.dtype | None = None, overrides: Mapping[str, object] | None = None
    ) -> Provider:
        """Set fields, and check the config.

        Args:
            dtype: the dtype of all parameters; None changes nothing.
            overrides: fields by name, applied after ``dtype``. With ``mtp_loss_scaling_factor`` and without
                ``mtp_num_layers``, the HF config decides the number of MTP layers.

        Raises:
            ConfigError, MeshError: as ``build_model``, for a setting that cannot be applied, or that contradicts the
                model of the HF config.
        """
        if dtype is not None:
            self.params_dtype, self.fp16, self.bf16 = dtype, dtype is torch.float16, dtype is torch.bfloat16
        for name, value in with_mtp_layers(overrides or {}, self._blueprint.hf).items():
            if not hasattr(self, name):
                require_overridable([name], decided=frozenset(), latent=self.multi_latent_attention)
            setattr(self, name, value)
        self.finalize()
        return self

    def finalize(self) -> None:
        """Check the fields that were set, and derive others from them.

        Raises:
            ConfigError, MeshError: as ``apply_overrides_and_finalize``.
        """
        if is_for_modelopt := vars(self).get("transformer_layer_spec") is modelopt_transformer_layer_spec:
            del self.transformer_layer_spec
        changes = changes_of(self._blueprint)
        if self.expert_tensor_parallel_size is None and parallel_state.model_parallel_is_initialized():
            changes["expert_tensor_parallel_size"] = ParallelDims.from_mcore().etp
        dims, overrides = split(changes, self._blueprint.dims)
        self.__dict__.update(dims.to_config_fields())  # sizes that were None, which build would treat as changes
        dtype = overrides.pop("params_dtype", None)
        assert dtype is None or isinstance(dtype, torch.dtype)
        head = "value" if any(isinstance(hook, ValueHead) for hook in self._hooks) else None
        backend = "torch" if is_for_modelopt else None
        changed = {"dtype": dtype, "head": head, "backend": backend, "vision": self.vision, "model": self.model}
        self._blueprint = settle_same(self._blueprint, dims=dims, overrides=overrides, **changed)

    def provide(self, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> GPTModel:
        """Build the bare chunk of one stage of this rank, for Megatron-LM's ``get_model``. No hook is called.

        Args:
            pre_process, post_process: whether the caller expects the embedding, and the output layer, in this stage.
            vp_stage: the virtual stage; None means the current one of ``parallel_state``.

        Raises:
            ConfigError, CheckpointError: as ``build_model``.
            MeshError: also if the caller splits the pipeline in another way.
        """
        self.finalize()
        blueprint = reconcile(self._blueprint)
        return build_one(blueprint, self._source, vp_stage, pre_process=pre_process, post_process=post_process)

    def provide_distributed_model(
        self,
        ddp_config: DistributedDataParallelConfig | None = None,
        wrap_with_ddp: bool = True,
        fp16: bool | None = None,
        bf16: bool | None = None,
        use_megatron_fsdp: bool = False,
        use_torch_fsdp2: bool = False,
        overlap_param_gather_with_optimizer_step: bool = False,
    ) -> list[nn.Module]:
        """Build this rank's chunks, by virtual stage, and run all hooks.

        Args:
            ddp_config: megatron-core's config of DDP, or a subclass.
            wrap_with_ddp: whether to wrap chunks in megatron-core's DDP.
            fp16, bf16: values for the config; None changes nothing.
            use_megatron_fsdp, use_torch_fsdp2, overlap_param_gather_with_optimizer_step: must be False.

        Raises:
            ConfigError, MeshError, CheckpointError: as ``build_model``.
        """
        ddp_config_of({"use_megatron_fsdp": use_megatron_fsdp or use_torch_fsdp2})
        if overlap_param_gather_with_optimizer_step:
            raise ConfigError(
                "overlap_param_gather_with_optimizer_step must be False: the chunks are wrapped without it. Set "
                "overlap_param_gather in the ddp_config"
            )
        if wrap_with_ddp and ddp_config is None:
            raise ConfigError(
                "wrap_with_ddp=True needs a ddp_config; pass create_ddp_config(...), or wrap_with_ddp=False"
            )
        self.fp16, self.bf16 = self.fp16 if fp16 is None else fp16, self.bf16 if bf16 is None else bf16
        self.finalize()
        freeze = parts_to_freeze(
            self._blueprint,
            text=self.freeze_language_model,
            tower=self.freeze_vision_model,
            connection=self.freeze_vision_projection,
        )
        chunks: list[Any] = list(build(lambda: (self._blueprint, self._source), freeze=freeze))
        for hook in self._hooks:
            chunks = list(hook(chunks) or chunks)
        return wrap(chunks, ddp_config if wrap_with_ddp else None)

    def __deepcopy__(self, memo: dict[int, object]) -> TransformerConfig:
        """Copy to a plain config instead of a provider: megatron-core copies configs for parts of a model."""
        kind = config_class(latent=self.multi_latent_attention, by_layer=isinstance(self, SizedByLayer))
        plain: TransformerConfig = object.__new__(kind)
        own = {name: value for name, value in vars(self).items() if name not in ("_blueprint", "_source", "_hooks")}
        plain.__dict__.update(copy.deepcopy(own, memo))
        return plain


class LatentProvider(Provider, MLATransformerConfig):
    """A provider of a model with multi-latent attention."""


def build_one(
    blueprint: Blueprint,
    source: HFWeights | None,
    vp_stage: int | None,
    *,
    pre_process: bool,
    post_process: bool,
    seed: int = 0,
) -> GPTModel:
    """Build the chunk of one stage of this rank.

    Args:
        blueprint: of the model.
        source: the weights; None keeps megatron-core's initial values.
        vp_stage: the virtual stage; None means the current one of ``parallel_state``.
        pre_process, post_process: whether the caller expects the embedding, and the output layer, in this stage.
        seed: as for ``build_model``.

    Raises:
        MeshError: there is no such stage, or the stage has other parts than expected.
        CheckpointError: as ``load_hf_weights``.
    """
    stage = stage_of(blueprint, vp_stage)
    if (stage.embedding, stage.loss) != (pre_process, post_process):
        raise MeshError(
            f"{stage} has embedding={stage.embedding} and loss={stage.loss}, found pre_process={pre_process} and "
            f"post_process={post_process}: split the pipeline in the same way in both"
        )
    with building(blueprint, seed=seed, initialise=source is None):
        chunk = build_chunk(blueprint, stage, seed=seed)
    if source is not None:
        load_hf_weights([chunk], source, dtype=blueprint.dtype)
    return chunk


def stage_of(blueprint: Blueprint, vp_stage: int | None) -> Stage:
    """This rank's stage.

    Raises:
        MeshError: there is no such virtual stage.
    """
    if vp_stage is None:
        vp_stage = parallel_state.get_virtual_pipeline_model_parallel_rank() or 0
    stages = own_stages(blueprint)
    if not 0 <= vp_stage < len(stages):
        raise MeshError(f"expected vp_stage below {blueprint.dims.vp}, found {vp_stage}")
    return stages[vp_stage]
