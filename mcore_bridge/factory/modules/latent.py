"""Multi-latent attention as in transformers, on either backend. mcore's class computes the attention.

Three things differ from mcore. The norms of latents have their own epsilon. Every TP rank holds the down projections
whole. The part of the keys that all heads share gets the gradients of all heads.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from mcore_bridge.errors import ConfigError

if TYPE_CHECKING:
    from megatron.core.transformer import MLATransformerConfig

    from mcore_bridge.factory.modules.backend import Backend


def adapt_latent(layer: Any, config: Any, backend: Backend) -> None:
    """Puts our latent attention into a layer's spec, if the model has latents. Norms are not fused into linears."""
    if not config.multi_latent_attention:
        return
    if getattr(config, "mla_down_proj_fusion", False):
        raise ConfigError(
            "mla_down_proj_fusion must be False, found True: no rule maps the fused weight. Remove the override."
        )
    from megatron.core.transformer.identity_op import IdentityOp

    from mcore_bridge.factory.modules.latent_modules import LatentAttention, ReplicatedLinear

    norm = latent_norm(backend)
    layer.self_attention.module = LatentAttention
    attention = layer.self_attention.submodules
    if backend == "torch":  # in TransformerEngine's spec the down projections are already replicated
        attention.linear_q_down_proj = attention.linear_kv_down_proj = ReplicatedLinear
    attention.linear_q_up_proj = attention.linear_kv_up_proj = attention.linear_q_proj
    attention.q_layernorm = IdentityOp if config.q_lora_rank is None else norm
    attention.kv_layernorm = norm


@functools.cache
def latent_norm(backend: Backend) -> type:
    """The norm of a latent. Its epsilon is ``config.latent_norm_epsilon``, not the one that mcore passes."""
    if backend == "torch":
        from mcore_bridge.factory.modules.latent_modules import LatentNorm

        return LatentNorm
    from megatron.core.extensions.transformer_engine import TENorm

    class LatentTENorm:
        """Makes a norm of TransformerEngine. As with mcore's ``TENorm``, the constructor returns another class."""

        def __new__(cls, config: MLATransformerConfig, hidden_size: int, eps: float = 1e-5, **arguments: Any) -> Any:
            return TENorm(config=config, hidden_size=hidden_size, eps=config.latent_norm_epsilon, **arguments)

    return LatentTENorm
