"""How the norms of a layer are called in checkpoints of megatron-core, whichever backend a model is built with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mcore_bridge.factory.backend import submodules_of

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
    attention = layer.self_attention.submodules
    fused = {}
    if hasattr(attention, "in_proj"):
        fused["input_layernorm."] = "self_attention.in_proj.layer_norm_"
    elif not config.multi_latent_attention:
        fused["input_layernorm."] = "self_attention.linear_qkv.layer_norm_"
    elif config.experimental_attention_variant != "dsa":  # whose indexer takes what the norm of queries gives as well
        fused["self_attention.q_layernorm."] = "self_attention.linear_q_up_proj.layer_norm_"
        fused["self_attention.kv_layernorm."] = "self_attention.linear_kv_up_proj.layer_norm_"
    if not hasattr(submodules_of(layer.mlp), "router"):
        fused["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    layer.sharded_state_dict_keys_map = fused
