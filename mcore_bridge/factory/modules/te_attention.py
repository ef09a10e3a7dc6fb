"""Chooses the core attention of each layer with backend te: TransformerEngine's, or torch's for features that TE lacks.

The list of missing features was read in the code of TransformerEngine 2.11 and tried on GPUs. Newer releases may have
more.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.modules.backend import LayerContext, say

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

CP_COMM_TYPES = (None, "p2p", "all_gather", "a2a", "a2a+p2p")
"""Values of ``cp_comm_type``. None: the best one for each layer. A list is refused, since megatron-core 0.16 uses the
value of the next layer.
"""
_RINGS = ("p2p", "a2a+p2p")


def adapt_kernel(layer: Any, context: LayerContext) -> None:
    """Puts the fastest core attention that supports the config into the spec of a layer, with backend te."""
    if context.backend != "te":
        return
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    attention = layer.self_attention.submodules
    if getattr(attention, "core_attention", None) is not TEDotProductAttention:
        return
    config = context.config
    sinks, windowed = config.softmax_type == "learnable", _is_windowed(config, context.number)
    if reason := lacking(config, windowed=windowed):
        from mcore_bridge.factory.modules.scores import ScoresCoreAttention
        from mcore_bridge.factory.modules.torch_modules import CoreAttention

        say(f"TransformerEngine has no attention {reason}: these layers use torch's")
        attention.core_attention = ScoresCoreAttention if sinks else CoreAttention
    elif sinks:
        say("TransformerEngine has no attention with sinks for packed sequences: these use torch's")
        attention.core_attention = with_sinks(TEDotProductAttention)
    elif windowed and config.context_parallel_size > 1 and config.cp_comm_type is None:
        layer.self_attention.params = {**(layer.self_attention.params or {}), "cp_comm_type": "a2a"}


def lacking(config: TransformerConfig, *, windowed: bool) -> str:
    """The feature of a layer's attention that TransformerEngine lacks with CP; "" if it has all, or without CP.

    Raises:
        ConfigError: ``cp_comm_type`` would give wrong results.
    """
    cp, latent = config.context_parallel_size, config.multi_latent_attention
    if cp == 1:
        return ""
    _require_known(config)
    kind = _exchange(config)
    if config.params_dtype is torch.float32:
        return "in fp32 under context parallelism"
    if config.softmax_type != "vanilla":
        return "with sinks under context parallelism (megatron-core would sum their gradients twice)"
    if not _has_kernel(dims := _head_dims(config)):
        return f"for heads of {sorted(dims)} under context parallelism"
    if windowed and (latent or len(dims) > 1 or config.attention_dropout):
        return "with windows of narrow values or dropped-out scores under context parallelism"
    if windowed and kind in _RINGS:
        return f"with windows for cp_comm_type={kind!r}"
    if len(dims) > 1 and kind not in (None, *_RINGS):
        return f"for queries and values of different size for cp_comm_type={kind!r}"
    dealt = _dealt(config, windowed=windowed)
    if _groups(config) % dealt:
        return f"under context parallelism that distributes {_groups(config)} key heads over {dealt} ranks"
    return ""


def _dealt(config: TransformerConfig, *, windowed: bool) -> int:
    """The number of ranks among which heads are distributed while a layer attends."""
    if config.cp_comm_type == "a2a+p2p":
        return int(config.hierarchical_context_parallel_sizes[0])
    by_heads = config.cp_comm_type == "a2a" or (windowed and config.cp_comm_type is None)
    return config.context_parallel_size if by_heads else 1


def _exchange(config: TransformerConfig) -> str | None:
    """How ranks exchange keys. If one of two levels has a single rank, TransformerEngine uses only the other."""
    if config.cp_comm_type == "a2a+p2p" and 1 in config.hierarchical_context_parallel_sizes:
        return "p2p" if config.hierarchical_context_parallel_sizes[0] == 1 else "a2a"
    return config.cp_comm_type


def _require_known(config: TransformerConfig) -> None:
    if config.cp_comm_type not in CP_COMM_TYPES:
        raise ConfigError(f"cp_comm_type must be one of {CP_COMM_TYPES}, found {config.cp_comm_type!r}")
    if config.cp_comm_type == "a2a+p2p" and not config.hierarchical_context_parallel_sizes:
        # TransformerEngine would attend to this rank's tokens only.
        raise ConfigError(
            'cp_comm_type="a2a+p2p" needs groups of two levels, found none: set ParallelDims('
            "hierarchical_context_parallel_sizes=(neighbours, rings)), whose product is cp, for groups and model"
        )


def _head_dims(config: TransformerConfig) -> set[int]:
    """Head dims of queries and keys, and of values."""
    if config.multi_latent_attention:
        return {config.qk_head_dim + config.qk_pos_emb_head_dim, config.v_head_dim}
    return {config.kv_channels, getattr(config, "value_channels", config.kv_channels)}


def _has_kernel(dims: set[int]) -> bool:
    """Whether a fused kernel supports these head dims. An H200 runs {64, 96} and {128, 192}, but not {128, 160}."""
    if any(dim % 8 or dim > 256 for dim in dims):
        return False
    return len(dims) == 1 or min(dims) < 128 or dims == {128, 192}


def _groups(config: TransformerConfig) -> int:
    """The number of key heads on a rank."""
    return max(1, (config.num_query_groups or config.num_attention_heads) // config.tensor_model_parallel_size)


def _is_windowed(config: TransformerConfig, number: int) -> bool:
    from megatron.core.transformer.utils import is_layer_window_attention

    return bool(is_layer_window_attention(config.window_size, config.window_attn_skip_freq, number + 1))


@functools.cache
def with_sinks(fused: type) -> type:
    """A subclass of ``fused`` (TE's attention) that runs packed sequences in torch, with the same sinks."""
    from mcore_bridge.factory.modules.scores import ScoresCoreAttention

    class SinkAttention(fused):
        """TransformerEngine's attention with sinks; torch's for packed sequences."""

        def __init__(
            self, config: TransformerConfig, *places: Any, cp_comm_type: str | None = None, **more: Any
        ) -> None:
            super().__init__(config, *places, cp_comm_type=cp_comm_type, **more)
            if config.perform_initialization:  # TransformerEngine leaves it uninitialised
                config.init_method(self.softmax_offset)
            steps = ScoresCoreAttention(config, *places, **more)
            self.__dict__["steps"] = steps  # not a submodule, so the sinks have only one name

        def forward(
            self, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, packed_seq_params: Any = None, **more: Any
        ) -> Tensor:
            attend = super().forward
            if packed_seq_params is not None:
                self.steps.softmax_offset = self.softmax_offset
                attend = self.steps.train(self.training)
            output: Tensor = attend(query, key, value, *arguments, packed_seq_params=packed_seq_params, **more)
            return output

    return SinkAttention
