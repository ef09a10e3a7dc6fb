"""Keys of norms in checkpoints of megatron-core, equal for both backends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from megatron.core.transformer.identity_op import IdentityOp

from mcore_bridge.factory.modules.backend import submodules_of
from mcore_bridge.rules.names import INDEXER, fused_norms

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

_NONE = SimpleNamespace()  # a layer of one half has no attention


def adapt_keys(layer: Any, config: TransformerConfig) -> None:
    """Make ``sharded_state_dict`` use the keys of megatron-core's own TransformerEngine specs for norms.

    These specs fuse a norm into the linear layer that follows. Our specs may keep it separate, so without this a
    checkpoint would fit only one backend. megatron-core's local specs use these keys, too, but only for a dense GPT.

    Args:
        layer: the submodules of a layer, with all its modules in place. It is changed in place.
        config: the config of the model.
    """
    modules = {f"self_attention.{name}" for name in vars(getattr(layer.self_attention, "submodules", _NONE))}
    if layer.mlp is not IdentityOp and not hasattr(submodules_of(layer.mlp), "router"):
        modules.add("mlp.linear_fc1")
    if config.experimental_attention_variant == "dsa":
        modules.add(INDEXER)
    layer.sharded_state_dict_keys_map = fused_norms(modules)
