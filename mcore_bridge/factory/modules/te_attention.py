"""What TransformerEngine's attention lacks, and what takes its place, layer by layer: torch's, and a message says so.

What is lacking was read in TransformerEngine 2.11 and tried on GPUs; newer ones lack less.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.modules.fallback import say

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

CP_COMM_TYPES = (None, "p2p", "all_gather", "a2a", "a2a+p2p")
"""What ``cp_comm_type`` may be: None is what each layer can have. No list: megatron-core 0.16 takes the value of the
next layer from one."""
_RINGS = ("p2p", "a2a+p2p")


def adapt_kernel(layer: Any, config: TransformerConfig, number: int) -> None:
    """Gives layer ``number`` (from 0) what attends best of what computes all that its config says."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    attention = layer.self_attention.submodules
    if getattr(attention, "core_attention", None) is not TEDotProductAttention:
        return
    sinks, windowed = config.softmax_type == "learnable", _is_windowed(config, number)
    if reason := lacking(config, windowed=windowed):
        from mcore_bridge.factory.modules.scores import ScoresCoreAttention
        from mcore_bridge.factory.modules.torch_modules import CoreAttention

        say(f"TransformerEngine has no attention {reason}: those layers have torch's")
        attention.core_attention = ScoresCoreAttention if sinks else CoreAttention
    elif sinks:
        say("TransformerEngine has no attention with sinks for packed sequences: they have torch's")
        attention.core_attention = with_sinks(TEDotProductAttention)
    elif windowed and config.context_parallel_size > 1 and config.cp_comm_type is None:
        layer.self_attention.params = {**(layer.self_attention.params or {}), "cp_comm_type": "a2a"}


def lacking(config: TransformerConfig, *, windowed: bool) -> str:
    """What a layer's attention has that TransformerEngine's has not, packed or not; nothing without CP.

    Raises:
        ConfigError: for a ``cp_comm_type`` with which results would be wrong.
    """
    cp, latent = config.context_parallel_size, config.multi_latent_attention
    if cp == 1:
        return ""
    _require_known(config)
    kind = _exchange(config)
    if config.params_dtype is torch.float32:
        return "in fp32 under context parallelism"
    if config.softmax_type != "vanilla":
        return "with sinks under context parallelism, whose gradients megatron-core would sum once more"
    if not _has_kernel(dims := _head_dims(config)):
        return f"for heads of {sorted(dims)} under context parallelism"
    if windowed and (latent or config.attention_dropout):
        return "with windows of latent or dropped-out scores under context parallelism"
    if windowed and kind in _RINGS:
        return f"with windows for cp_comm_type={kind!r}"
    if latent and len(dims) > 1 and kind not in (None, *_RINGS):
        return f"for queries and values of different size for cp_comm_type={kind!r}"
    dealt = _dealt(config, windowed=windowed)
    if _groups(config) % dealt:
        return f"under context parallelism of {dealt} ranks that {_groups(config)} key heads are dealt to"
    return ""


def _dealt(config: TransformerConfig, *, windowed: bool) -> int:
    """Over how many ranks heads are dealt while a layer attends."""
    if config.cp_comm_type == "a2a+p2p":
        return int(config.hierarchical_context_parallel_sizes[0])
    by_heads = config.cp_comm_type == "a2a" or (windowed and config.cp_comm_type is None)
    return config.context_parallel_size if by_heads else 1


def _exchange(config: TransformerConfig) -> str | None:
    """How ranks exchange keys: of two levels, one of which has one rank, TransformerEngine takes the other alone."""
    if config.cp_comm_type == "a2a+p2p" and 1 in config.hierarchical_context_parallel_sizes:
        return "p2p" if config.hierarchical_context_parallel_sizes[0] == 1 else "a2a"
    return config.cp_comm_type


def _require_known(config: TransformerConfig) -> None:
    if config.cp_comm_type not in CP_COMM_TYPES:
        raise ConfigError(f"cp_comm_type must be one of {CP_COMM_TYPES}, found {config.cp_comm_type!r}")
    if config.cp_comm_type == "a2a+p2p" and not config.hierarchical_context_parallel_sizes:
        # TransformerEngine would attend to this rank's tokens only.
        raise ConfigError(
            'cp_comm_type="a2a+p2p" needs groups of two levels: initialise them and the model with '
            "ParallelDims(hierarchical_context_parallel_sizes=(neighbours, rings)), whose product is cp"
        )


def _head_dims(config: TransformerConfig) -> set[int]:
    """Of queries and keys, and of values."""
    if config.multi_latent_attention:
        return {config.qk_head_dim + config.qk_pos_emb_head_dim, config.v_head_dim}
    return {config.kv_channels}


def _has_kernel(dims: set[int]) -> bool:
    """Whether a fused kernel takes heads of these dims. Tried on an H200: {64, 96}, {128, 192}, and not {128, 160}."""
    if any(dim % 8 or dim > 256 for dim in dims):
        return False
    return len(dims) == 1 or min(dims) < 128 or dims == {128, 192}


def _groups(config: TransformerConfig) -> int:
    """Heads of keys on a rank, which those of queries are a multiple of."""
    return max(1, (config.num_query_groups or config.num_attention_heads) // config.tensor_model_parallel_size)


def _is_windowed(config: TransformerConfig, number: int) -> bool:
    from megatron.core.transformer.utils import is_layer_window_attention

    return bool(is_layer_window_attention(config.window_size, config.window_attn_skip_freq, number + 1))


@functools.cache
def with_sinks(fused: type) -> type:
    """``fused`` (TransformerEngine's attention) for rows, and torch's steps with the same sinks for packed ones."""
    from mcore_bridge.factory.modules.scores import ScoresCoreAttention

    class SinkAttention(fused):
        """Attention with sinks."""

        def __init__(
            self, config: TransformerConfig, *places: Any, cp_comm_type: str | None = None, **more: Any
        ) -> None:
            super().__init__(config, *places, cp_comm_type=cp_comm_type, **more)
            if config.perform_initialization:  # TransformerEngine leaves there what was in memory
                config.init_method(self.softmax_offset)
            steps = ScoresCoreAttention(config, *places, **more)
            self.__dict__["steps"] = steps  # no submodule: the sinks have one name

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
