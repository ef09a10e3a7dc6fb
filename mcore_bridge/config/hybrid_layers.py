"""The layers of a model in the notation of megatron-core's ``HybridModel``: a letter for each half of a layer."""

from typing import TYPE_CHECKING

from mcore_bridge.config.tables.derived import layers_but_full
from mcore_bridge.config.tables.derived_hybrid import FIRST
from mcore_bridge.config.tables.moe import layers_of

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


def letters_of(config: "TransformerConfig") -> tuple[str, ...]:
    """The letters of each layer, in the order of its halves.

    They are "M" (Mamba-2), "G" (the gated delta rule), "*" (attention), "+" (latent attention), "D" (latent attention
    over selected tokens), "-" (MLP) and "E" (experts).
    """
    own = getattr(config, "layer_kinds", None)
    if own is not None:
        kinds = own[: config.num_layers]
        return tuple("".join(sorted(kind, key=lambda letter: letter not in FIRST)) for kind in kinds)
    variant, settings = config.experimental_attention_variant, vars(config)
    full = {True: "D" if variant == "dsa" else "+", False: "*"}[config.multi_latent_attention]
    linear = variant == "gated_delta_net"
    first = layers_but_full(settings, "linear_attention_freq", unset=0) if linear else [0] * config.num_layers
    second = layers_of(settings) if config.num_moe_experts else [0] * config.num_layers
    halves = zip(first, second, strict=True)
    return tuple(("G" if is_linear else full) + ("E" if is_sparse else "-") for is_linear, is_sparse in halves)
