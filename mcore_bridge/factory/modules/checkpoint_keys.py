"""How the norms of a layer are called in checkpoints of megatron-core, whichever backend a model is built with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mcore_bridge.factory.modules.backend import submodules_of
from mcore_bridge.rules.names import INDEXER, fused_norms

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


def adapt_keys(layer: Any, config: TransformerConfig) -> None:
    """Have ``sharded_state_dict`` spell norms as megatron-core's own TransformerEngine specs do.

    These fuse a norm into the linear layer behind it, where one takes all that it gives. Where our specs have the norm
    apart, a checkpoint would otherwise fit one backend alone. megatron-core's local specs do so for a dense GPT only.

    Args:
        layer: the submodules of a layer with all its modules in place, changed in place.
        config: of the model.
    """
    modules = {f"self_attention.{name}" for name in vars(layer.self_attention.submodules)}
    if not hasattr(submodules_of(layer.mlp), "router"):
        modules.add("mlp.linear_fc1")
    if config.experimental_attention_variant == "dsa":
        modules.add(INDEXER)
    layer.sharded_state_dict_keys_map = fused_norms(modules)
