"""The module of sparse latent attention, which megatron-core has since 0.19: import it only where a model has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.core.transformer.experimental_attention_variant.absorbed_mla import AbsorbedMLASelfAttention

from mcore_bridge.factory.modules.latent_modules import hold_whole

if TYPE_CHECKING:
    from megatron.core.transformer import MLATransformerConfig


class SparseLatentAttention(AbsorbedMLASelfAttention):
    """mcore's attention to selected tokens, in the space of latents, whose down projections are whole.

    Only a loss of its own trains the indexer. Where ``dsa_indexer_loss_coeff`` asks for none it is frozen: otherwise an
    optimizer would decay it, and mcore's DDP would wait for its gradients where it overlaps their reduction.
    """

    def __init__(self, config: MLATransformerConfig, submodules: Any, *arguments: Any, **keywords: Any) -> None:
        super().__init__(config, submodules, *arguments, **keywords)
        hold_whole(self, config)
        indexer = self.core_attention.indexer
        if indexer is not None and not config.dsa_indexer_loss_coeff:
            indexer.requires_grad_(False)
