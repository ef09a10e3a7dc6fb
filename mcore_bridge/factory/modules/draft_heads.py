"""Draft heads: the class of each kind, and how their layers differ from usual ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear

from mcore_bridge.config.draft import BlockFields, DraftFields, MarkovFields
from mcore_bridge.factory.modules.backend import Backend, LayerContext, mixed, norm_of
from mcore_bridge.factory.modules.dflash import BlockAttention, ContextAttention, DFlashModel
from mcore_bridge.factory.modules.dspark import DSparkModel
from mcore_bridge.factory.modules.eagle3 import Eagle3Model, TwiceAsWide, UnrolledAttention, two_norms

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

_CLASSES: dict[type, type[GPTModel]] = {DraftFields: Eagle3Model, BlockFields: DFlashModel, MarkovFields: DSparkModel}


def head_class(config: TransformerConfig) -> type[GPTModel] | None:
    """The class of a draft head with this config; None for another model."""
    return _CLASSES[type(config.draft)] if hasattr(config, "draft") else None


def adapt_draft(layer: Any, context: LayerContext) -> None:
    """Let the layer of a draft head read ``[embedding, hidden]``, or blocks. Other configs have no ``draft``."""
    config, backend = context.config, context.backend
    if not hasattr(config, "draft"):
        return
    if isinstance(config.draft, BlockFields):
        _read_blocks(layer, config, backend)
        return
    linear = _without_norm(backend)
    add = layer.self_attn_bda

    def add_to_hidden(training: bool, fused: bool) -> Any:
        whole = add(training, fused)
        return lambda output, joined, dropout: whole(output, joined.chunk(2, -1)[1], dropout)

    layer.input_layernorm, layer.self_attn_bda = two_norms(norm_of(backend, config)), add_to_hidden
    attention = layer.self_attention.submodules
    attention.linear_qkv = mixed(TwiceAsWide, linear)
    attention.core_attention = mixed(UnrolledAttention, attention.core_attention)
    del layer.sharded_state_dict_keys_map["input_layernorm."]  # no linear layer has these norms inside


def _read_blocks(layer: Any, config: TransformerConfig, backend: Backend) -> None:
    """Let a layer read blocks, and a context that its first norm does not change."""
    attention = layer.self_attention
    layer.input_layernorm = norm_of(backend, config)
    attention.module = mixed(ContextAttention, attention.module)
    attention.submodules.linear_qkv, attention.submodules.core_attention = _without_norm(backend), BlockAttention
    layer.sharded_state_dict_keys_map.pop("input_layernorm.", None)


def _without_norm(backend: Backend) -> type:
    """The linear layer of a backend. The usual one of TransformerEngine has a norm inside."""
    if backend != "te":
        return ColumnParallelLinear
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

    linear: type = TEColumnParallelLinear
    return linear
