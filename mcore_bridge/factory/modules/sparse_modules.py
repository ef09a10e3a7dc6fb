"""The module of sparse attention. Import it only for a model that has it: it needs megatron-core 0.19."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.core.transformer.experimental_attention_variant.absorbed_mla import AbsorbedMLASelfAttention

from mcore_bridge.factory.modules.latent_modules import hold_whole

if TYPE_CHECKING:
    from megatron.core.transformer import MLATransformerConfig


class SparseLatentAttention(AbsorbedMLASelfAttention):
    """mcore's sparse attention with whole down projections.

    Only a separate loss trains the indexer. If ``dsa_indexer_loss_coeff`` is zero, the indexer is frozen: otherwise
    weight decay would change it, and mcore's DDP would wait for its gradients when it overlaps their reduction.
    """

    def __init__(self, config: MLATransformerConfig, submodules: Any, *arguments: Any, **keywords: Any) -> None:
        super().__init__(config, submodules, *arguments, **keywords)
        hold_whole(self, config)
        indexer = self.core_attention.indexer
        if indexer is not None and not config.dsa_indexer_loss_coeff:
            indexer.requires_grad_(False)
