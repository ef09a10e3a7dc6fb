"""Multi-latent attention as transformers computes it, with whole down projections on either backend.

mcore's own class does the attention. Around it: the latents' norms have an epsilon of their own, the down projections
are whole on every TP rank, and what the keys of all heads share gets the gradients of all heads.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from mcore_bridge.errors import ConfigError

if TYPE_CHECKING:
    from megatron.core.transformer import MLATransformerConfig

    from mcore_bridge.factory.modules.backend import Backend


def adapt_latent(layer: Any, config: Any, backend: Backend) -> None:
    """Gives a layer's spec our latent attention, if the model has one. Its norms are modules of their own."""
    if not config.multi_latent_attention:
        return
    if getattr(config, "mla_down_proj_fusion", False):
        raise ConfigError("mla_down_proj_fusion must be False: its weight has no rule. Remove the override.")
    from megatron.core.transformer.identity_op import IdentityOp

    from mcore_bridge.factory.modules.latent_modules import LatentAttention

    norm = latent_norm(backend)
    layer.self_attention.module = LatentAttention
    attention = layer.self_attention.submodules
    attention.linear_q_up_proj = attention.linear_kv_up_proj = attention.linear_q_proj
    attention.q_layernorm = IdentityOp if config.q_lora_rank is None else norm
    attention.kv_layernorm = norm


@functools.cache
def latent_norm(backend: Backend) -> type:
    """The norm of a latent: with ``config.latent_norm_epsilon``, whatever epsilon mcore passes."""
    if backend == "torch":
        from mcore_bridge.factory.modules.latent_modules import LatentNorm

        return LatentNorm
    from megatron.core.extensions.transformer_engine import TENorm

    class LatentTENorm:
        """TransformerEngine's norm; like mcore's ``TENorm``, its constructor returns it."""

        def __new__(cls, config: MLATransformerConfig, hidden_size: int, eps: float = 1e-5, **arguments: Any) -> Any:
            return TENorm(config=config, hidden_size=hidden_size, eps=config.latent_norm_epsilon, **arguments)

    return LatentTENorm
