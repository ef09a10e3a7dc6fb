"""The core module of sparse attention. It needs megatron-core 0.19: import it only for such a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.core.transformer.experimental_attention_variant.absorbed_mla import AbsorbedMLASelfAttention

if TYPE_CHECKING:
    from megatron.core.transformer import MLATransformerConfig
    from torch import Tensor


class SparseLatentAttention(AbsorbedMLASelfAttention):
    """mcore's sparse attention, whose up projections may have adapters.

    Only a separate loss trains the indexer. If ``dsa_indexer_loss_coeff`` is zero, the indexer is frozen. Otherwise
    weight decay would change it, and mcore's DDP would wait for its gradients when it overlaps their reduction.
    """

    def __init__(self, config: MLATransformerConfig, submodules: Any, *arguments: Any, **keywords: Any) -> None:
        super().__init__(config, submodules, *arguments, **keywords)
        indexer = self.core_attention.indexer
        if indexer is not None and not config.dsa_indexer_loss_coeff:
            indexer.requires_grad_(False)

    def _get_kv_up_weights(self) -> tuple[Tensor, Tensor]:
        """The up projections of keys and values, with the adapter of ``linear_kv_up_proj``, if it has one.

        mcore reads the weight and does not run the module, so the adapter's hook would never be called.
        """
        linear = self.linear_kv_up_proj
        weight = linear.adapter.added_to(linear.weight) if hasattr(linear, "adapter") else linear.weight
        heads = weight.unflatten(0, (self.num_attention_heads_per_partition, -1))
        return heads.split((self.config.qk_head_dim, self.config.v_head_dim), dim=1)
