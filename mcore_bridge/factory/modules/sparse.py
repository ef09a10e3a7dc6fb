"""Sparse attention: latent attention over the tokens that an indexer selects for each query (mcore 0.19's "dsa").

mcore's own classes compute it, on either backend in plain torch unless fused kernels are requested. As with all latent
attention, the norms of latents have their own epsilon, and every TP rank holds the down projections whole.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.modules.fallback import say

if TYPE_CHECKING:
    from mcore_bridge.factory.modules.backend import Backend


def adapt_sparse(layer: Any, config: Any, backend: Backend) -> None:
    """Puts sparse attention into a layer's spec, with the modules of our latent attention, if the model has it."""
    if config.experimental_attention_variant != "dsa":
        return
    _require_no_recompute(config)
    if backend == "te":
        say("TransformerEngine has no sparse attention: megatron-core computes it in torch")
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.experimental_attention_variant.absorbed_mla import (
        AbsorbedMLASelfAttentionSubmodules,
    )
    from megatron.core.transformer.spec_utils import ModuleSpec

    from mcore_bridge.factory.modules.sparse_modules import SparseLatentAttention

    latent = layer.self_attention.submodules
    names = {field.name for field in dataclasses.fields(AbsorbedMLASelfAttentionSubmodules)} - {"core_attention"}
    shared = {name: getattr(latent, name) for name in names}
    layer.self_attention = ModuleSpec(
        module=SparseLatentAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=AbsorbedMLASelfAttentionSubmodules(core_attention=_core(latent, backend), **shared),
    )


def _core(latent: Any, backend: Backend) -> Any:
    from megatron.core.transformer.experimental_attention_variant.dsa import (
        DSAIndexer,
        DSAIndexerSubmodules,
        DSAttention,
        DSAttentionSubmodules,
    )
    from megatron.core.transformer.spec_utils import ModuleSpec

    from mcore_bridge.factory.modules.backend import norm_of

    whole = latent.linear_kv_down_proj
    indexer = DSAIndexerSubmodules(
        linear_wq_b=whole, linear_wk=whole, k_norm=norm_of(backend), linear_weights_proj=whole
    )
    return ModuleSpec(
        module=DSAttention,
        submodules=DSAttentionSubmodules(indexer=ModuleSpec(module=DSAIndexer, submodules=indexer)),
    )


def _require_no_recompute(config: Any) -> None:
    """Raises ``ConfigError`` if attention is recomputed and layers share selections.

    mcore keeps only the selections of the latest forward, so selections of another microbatch would be used.
    """
    granularity = config.recompute_granularity
    recomputed = granularity == "full" or (granularity == "selective" and "core_attn" in config.recompute_modules)
    if recomputed and config.dsa_indexer_topk_freq > 1:
        raise ConfigError(
            "attention must not be recomputed in a model whose layers share selections, found recompute_granularity="
            f"{granularity!r}, recompute_modules={config.recompute_modules}: megatron-core no longer has the "
            "selection in the recompute. Recompute other modules."
        )
