"""The interface of ``mbridge`` for verl (``vanilla_mbridge=True``) and siiRL, implemented with this library.

The mesh comes from ``parallel_state``, with sequence parallelism if there is tensor parallelism.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from mcore_bridge.architecture import text_config
from mcore_bridge.config.mesh.parallel_dims import ParallelDims
from mcore_bridge.factory.blueprint import Blueprint, BuildOptions, make_blueprint
from mcore_bridge.factory.build import build
from mcore_bridge.trainers.loading import load_folder
from mcore_bridge.trainers.settings import require_same_model, settle_same, split, with_mtp_layers
from mcore_bridge.trainers.weight_export import WeightExport
from mcore_bridge.trainers.wrap import ddp_config_of, freeze_routers, require_value_head, wrap
from mcore_bridge.weights.model_chunks import chunks_of
from mcore_bridge.weights.save import save_hf_checkpoint

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig
    from transformers import PretrainedConfig

__all__ = ["AutoBridge", "Bridge", "make_value_model", "freeze_moe_router"]

Callback = Callable[..., object]
"""Called with a bare chunk and, by name, ``pre_process``, ``post_process``, ``config`` and ``hf_config``."""
_DDP = {"grad_reduce_in_fp32": True, "use_distributed_optimizer": True}
_REPLAY = "enable_routing_replay"
"""A name that is no field of megatron-core. Routers with verl's router replay read it from the config."""


def make_value_model(
    model: nn.Module, pre_process: bool, post_process: bool, config: TransformerConfig, hf_config: PretrainedConfig
) -> None:
    """A callback for ``get_model``: the model is built with a value head, and without an LM head.

    Raises:
        ConfigError: when the model was built without a value head.
    """
    require_value_head([model])


def freeze_moe_router(
    model: nn.Module, pre_process: bool, post_process: bool, config: TransformerConfig, hf_config: PretrainedConfig
) -> None:
    """A callback for ``get_model``: freeze routers and the gates of shared experts."""
    freeze_routers([model])


class AutoBridge:
    """Makes bridges."""

    @classmethod
    def from_config(cls, hf_config: PretrainedConfig, *, dtype: torch.dtype = torch.bfloat16) -> Bridge:
        """Make a bridge for an HF config, which is copied. megatron-core's process groups must exist.

        Args:
            hf_config: the config of a causal LM, or of a composite, whose text is built.
            dtype: the dtype of all parameters.

        Raises:
            ConfigError, MeshError: as ``build_model``.
        """
        return Bridge(hf_config, dtype)


class Bridge:
    """One model of a trainer: it provides the config, then the chunks, then their weights."""

    def __init__(self, hf_config: PretrainedConfig, dtype: torch.dtype) -> None:
        self.hf_config, self.dtype = hf_config, dtype
        self.extra_args: dict[str, object] = {}
        self._blueprint = self._draw()

    @property
    def config(self) -> TransformerConfig:
        """The config object with which ``get_model`` builds. Fields may be set on it until then."""
        return self._blueprint.config

    def set_extra_args(self, **settings: object) -> None:
        """Override fields of ``TransformerConfig``, and make a new ``config``.

        With ``mtp_loss_scaling_factor`` and without ``mtp_num_layers``, the HF config decides the number of MTP layers.
        ``vision`` and ``model`` are arguments of ``build_model``: "text_only" and "gpt" by default.
        ``enable_routing_replay`` is set on ``config`` unchanged, for verl's own routers, which read it.

        Raises:
            ConfigError, MeshError: as ``build_model``, for a setting that cannot be applied, or that contradicts the
                model of the HF config.
        """
        self.extra_args |= settings
        self._blueprint = self._draw()

    def get_model(
        self,
        post_model_creation_callbacks: Sequence[Callback] = (),
        wrap_with_ddp: bool = False,
        fp16: bool | None = None,
        bf16: bool | None = None,
        ddp_config: Mapping[str, object] | None = None,
    ) -> list[nn.Module]:
        """Build this rank's chunks, by virtual stage, with megatron-core's random weights.

        Args:
            post_model_creation_callbacks: functions that are called with each bare chunk, before it is wrapped.
            wrap_with_ddp: whether to wrap chunks in megatron-core's DDP.
            fp16, bf16: values for ``config``; None changes nothing.
            ddp_config: further settings of DDP, beside fp32 gradients and the distributed optimizer.

        Raises:
            ConfigError, MeshError: as ``build_model``. Fields that were set on ``config`` are checked like overrides.
        """
        ddp = ddp_config_of({**_DDP, **(ddp_config or {})}) if wrap_with_ddp else None
        halves = {"fp16": fp16, "bf16": bf16}
        vars(self.config).update({name: value for name, value in halves.items() if value is not None})
        head = "value" if make_value_model in post_model_creation_callbacks else "lm"
        self._blueprint = settle_same(self._blueprint, head=head)
        chunks = build(lambda: (self._blueprint, None))
        for chunk in chunks:
            for callback in post_model_creation_callbacks:
                callback(
                    chunk,
                    pre_process=chunk.pre_process,
                    post_process=chunk.post_process,
                    config=self.config,
                    hf_config=self.hf_config,
                )
        return wrap(chunks, ddp)

    def load_weights(
        self, models: Sequence[nn.Module], weights_path: str | os.PathLike[str], memory_efficient: bool = False
    ) -> None:
        """Copy the weights of a folder into the chunks, in place.

        Args:
            models: from ``get_model``.
            weights_path: an HF folder with the models' head. At the first load it may also be the folder of a causal
                LM: a value head then keeps its random values.
            memory_efficient: without effect, as a rank only reads its own slices.

        Raises:
            CheckpointError: the folder does not fit the model, or a later folder lacks its head.
        """
        is_first = chunks_of(models)[0].bridge.folder is None
        load_folder(models, weights_path, dtype=self.dtype, may_draw_head=is_first)

    def export_weights(self, models: Sequence[nn.Module], *, merged: bool | None = None) -> WeightExport:
        """Yield every HF tensor, whole, on every rank, like ``iter_hf_weights``."""
        return WeightExport(models, merged=merged)

    def save_weights(
        self,
        models: Sequence[nn.Module],
        weights_path: str | os.PathLike[str],
        memory_efficient: bool = False,
        distributed_filesystem: bool = False,
        strict: bool = True,
        *,
        merged: bool | None = None,
    ) -> None:
        """Write an HF checkpoint, as ``save_hf_checkpoint``. All ranks call it, with a folder that they share.

        Args:
            models: from ``get_model``.
            weights_path: the folder. Other files in it stay, and so do its config and its tokenizer.
            memory_efficient, distributed_filesystem, strict: without effect. All ranks write at the same time, no file
                is kept in memory, and all tensors are written.
            merged: for models with adapters, as for ``save_hf_checkpoint``.
        """
        save_hf_checkpoint(models, weights_path, keep=True, merged=merged)

    def _draw(self) -> Blueprint:
        mesh = ParallelDims.from_mcore()
        mesh = replace(mesh, sp=mesh.tp > 1)
        schedule = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall", "batch_p2p_comm": False}
        settings = with_mtp_layers(self.extra_args, text_config(self.hf_config))
        for_routers = {_REPLAY: settings.pop(_REPLAY)} if _REPLAY in settings and _routers_read_replay() else {}
        vision, model = str(settings.pop("vision", "text_only")), str(settings.pop("model", "gpt"))
        dims, overrides = split({**schedule, "overlap_p2p_comm": mesh.vp > 1, **settings}, mesh)
        overrides = require_same_model(self.hf_config, overrides, dtype=self.dtype)
        options = BuildOptions(dims=dims, dtype=self.dtype, overrides=overrides, vision=vision, model=model)
        blueprint = make_blueprint(self.hf_config, options)
        vars(blueprint.config).update(for_routers)
        return blueprint


def _routers_read_replay() -> bool:
    from megatron.core.transformer.moe.router import TopKRouter

    return hasattr(TopKRouter, "_router_replay_patched")  # verl sets this on routers that it has patched
