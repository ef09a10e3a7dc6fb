"""The surface of ``mbridge``, as verl (``vanilla_mbridge=True``) and siiRL call it, over ours.

The mesh is that of ``parallel_state``, with sequence parallelism wherever there is tensor parallelism.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mcore_bridge.config.mesh.parallel_dims import ParallelDims
from mcore_bridge.factory.blueprint import Blueprint, make_blueprint
from mcore_bridge.factory.build import build
from mcore_bridge.trainers.loading import load_folder
from mcore_bridge.trainers.settings import require_same_model, settle_same, split, with_mtp_layers
from mcore_bridge.trainers.wrap import ddp_config_of, freeze_routers, require_value_head, wrap
from mcore_bridge.weights.bound import chunks_of
from mcore_bridge.weights.export import iter_hf_weights
from mcore_bridge.weights.save import save_hf_checkpoint

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig
    from transformers import PretrainedConfig

__all__ = ["AutoBridge", "Bridge", "make_value_model", "freeze_moe_router"]

Callback = Callable[..., object]
"""Called with a bare chunk and, by name, ``pre_process``, ``post_process``, ``config`` and ``hf_config``."""
_DDP = {"grad_reduce_in_fp32": True, "use_distributed_optimizer": True}
_REPLAY = "enable_routing_replay"
"""No field of megatron-core: the routers of verl's router replay, before megatron-core had one, look for it."""


def make_value_model(
    model: nn.Module, pre_process: bool, post_process: bool, config: TransformerConfig, hf_config: PretrainedConfig
) -> None:
    """Among the callbacks of ``get_model``: build with a value head. An LM head is never there.

    Raises:
        ConfigError: when it is called for a model that was built without one.
    """
    require_value_head([model])


def freeze_moe_router(
    model: nn.Module, pre_process: bool, post_process: bool, config: TransformerConfig, hf_config: PretrainedConfig
) -> None:
    """Among the callbacks of ``get_model``: freeze routers and the gates of shared experts."""
    freeze_routers([model])


class AutoBridge:
    """Where a bridge comes from."""

    @classmethod
    def from_config(cls, hf_config: PretrainedConfig, *, dtype: torch.dtype = torch.bfloat16) -> Bridge:
        """A bridge for an HF config, which is copied. Needs megatron-core's process groups.

        Args:
            hf_config: of a causal LM.
            dtype: of all parameters.

        Raises:
            ConfigError, MeshError: as ``build_model``.
        """
        return Bridge(hf_config, dtype)


class Bridge:
    """One model of a trainer: its config, then its chunks, then their weights."""

    def __init__(self, hf_config: PretrainedConfig, dtype: torch.dtype) -> None:
        self.hf_config, self.dtype = hf_config, dtype
        self.extra_args: dict[str, object] = {}
        self._blueprint = self._draw()

    @property
    def config(self) -> TransformerConfig:
        """What ``get_model`` builds with, this very object: fields may be set on it until then."""
        return self._blueprint.config

    def set_extra_args(self, **settings: object) -> None:
        """Override fields of ``TransformerConfig``, and make a new ``config``.

        With ``mtp_loss_scaling_factor`` and without ``mtp_num_layers`` there are as many MTP layers as the HF config
        says. ``enable_routing_replay`` is set on ``config`` as it is, where routers are verl's own, which read it.

        Raises:
            ConfigError, MeshError: as ``build_model``, for a setting that it cannot honour, or with which the model
                would be another one than the HF config says.
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
        """This rank's chunks, by virtual stage, with weights as megatron-core draws them.

        Args:
            post_model_creation_callbacks: called with each bare chunk, before anything is wrapped.
            wrap_with_ddp: put them into megatron-core's DDP.
            fp16, bf16: set on ``config``; None leaves it as it is.
            ddp_config: of DDP, beside fp32 gradients and the distributed optimizer.

        Raises:
            ConfigError, MeshError: as ``build_model``; what was set on ``config`` is checked as overrides are.
        """
        ddp = ddp_config_of({**_DDP, **(ddp_config or {})}) if wrap_with_ddp else None
        halves = {"fp16": fp16, "bf16": bf16}
        vars(self.config).update({name: value for name, value in halves.items() if value is not None})
        head = "value" if make_value_model in post_model_creation_callbacks else "lm"
        self._blueprint = settle_same(self._blueprint, head=head)
        chunks = build(self._blueprint, None)
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
            weights_path: of what was saved with a head where the models have one. The first time it may also be of a
                causal LM: a value head then stays as it was drawn.
            memory_efficient: either way a rank reads its own slices only.

        Raises:
            CheckpointError: the folder does not fit the model, or a later one lacks its head.
        """
        is_first = chunks_of(models)[0].bridge.folder is None
        load_folder(models, weights_path, dtype=self.dtype, may_draw_head=is_first)

    def export_weights(self, models: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
        """Every HF tensor, whole, on every rank: ``iter_hf_weights``. Nothing happens before the first is asked for."""
        return iter_hf_weights(models)

    def save_weights(
        self,
        models: Sequence[nn.Module],
        weights_path: str | os.PathLike[str],
        memory_efficient: bool = False,
        distributed_filesystem: bool = False,
        strict: bool = True,
    ) -> None:
        """Write an HF checkpoint: ``save_hf_checkpoint``. Called by all ranks; the folder is one that they share.

        Args:
            models: from ``get_model``.
            weights_path: the folder. Other files in it stay, and a config and a tokenizer that it has.
            memory_efficient, distributed_filesystem, strict: all ranks write at the same time, no file is held in
                memory, and all tensors are written, whatever these say.
        """
        save_hf_checkpoint(models, weights_path, keep=True)

    def _draw(self) -> Blueprint:
        mesh = ParallelDims.from_mcore()
        mesh = replace(mesh, sp=mesh.tp > 1)
        schedule = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall", "batch_p2p_comm": False}
        asked = with_mtp_layers(self.extra_args, self.hf_config)
        for_routers = {_REPLAY: asked.pop(_REPLAY)} if _REPLAY in asked and _routers_read_replay() else {}
        dims, overrides = split({**schedule, "overlap_p2p_comm": mesh.vp > 1, **asked}, mesh)
        overrides = require_same_model(self.hf_config, overrides, dtype=self.dtype)
        drawn = make_blueprint(self.hf_config, dims=dims, dtype=self.dtype, overrides=overrides)
        vars(drawn.config).update(for_routers)
        return drawn


def _routers_read_replay() -> bool:
    from megatron.core.transformer.moe.router import TopKRouter

    return hasattr(TopKRouter, "_router_replay_patched")  # by which verl marks what it has done to them
