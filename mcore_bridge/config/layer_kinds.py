"""The kind of each layer: with experts, full attention or a rope; also of layers for multi-token prediction (MTP).

megatron-core's ``HybridModel`` has a letter for each kind of layer.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mcore_bridge.config.fields import Mcore, per_layer

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig
    from transformers import PretrainedConfig


FIRST, SECOND = frozenset("MC*"), frozenset("-E")
"""Kinds of the first half of a layer (mixer, attention) and of its second half (MLP, experts)."""
MTP_KINDS = ("*", "*-", "*E")
"""The possible parts of an MTP layer, if the config lists them: attention, optionally followed by an MLP or experts."""
MTP_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""Fields for the number of MTP layers. A family has one of them, or none."""


def counted_mtp_layers(hf: PretrainedConfig) -> int:
    """The number of MTP layers that a config counts."""
    return max(getattr(hf, name, None) or 0 for name in MTP_COUNTS)


def layers_of(mcore: Mcore) -> list[int]:
    """1 for each layer with experts, from ``moe_layer_freq``, which is a list or a number."""
    return per_layer(mcore, "moe_layer_freq", unset=True, rule=lambda layer, n: layer % n == 0)


def layers_but_full(mcore: Mcore, freq: str, *, unset: int) -> list[int]:
    """1 for each layer without full attention. ``freq`` holds a list of these, or n if every n-th layer is full."""
    return per_layer(mcore, freq, unset=bool(unset), rule=lambda layer, n: (layer + 1) % n != 0)


def layers_without_rope(mcore: Mcore) -> list[int]:
    """1 for each layer without rope. ``no_rope_freq`` holds a list of these, or n if every n-th layer has none."""
    return per_layer(mcore, "no_rope_freq", unset=False, rule=lambda layer, n: (layer + 1) % n == 0)


def shares_selection(layer: int, *, freq: int, offset: int) -> bool:
    """Whether ``layer`` (counted from 0) has no indexer, and uses the selection of an earlier layer."""
    return max(layer + 1 - max(offset, 1), 0) % freq != 0


def held_mtp_layers(settings: Mapping[str, Any]) -> int:
    """The number of MTP layers that a model holds. A repeated layer holds one set of weights for all its predictions.

    Args:
        settings: ``TransformerConfig`` fields by name, or overrides of them.
    """
    predictions: int = settings.get("mtp_num_layers") or 0
    return min(predictions, 1) if settings.get("mtp_use_repeated_layer") else predictions


def inner_config(config: TransformerConfig) -> TransformerConfig:
    """A config whose last layer has the kind of the layers within MTP layers."""
    kinds: str | None = getattr(config, "mtp_kinds", None)
    like: int | None = getattr(config, "mtp_like_layer", None)
    if kinds is None and like is None:
        return config  # they are like the last layer of the decoder
    own: Any = copy.copy(config)
    own.num_layers = 1
    if kinds is not None:
        own.layer_kinds, own.moe_layer_freq = (kinds,), [int("E" in kinds)]
    elif like is not None:
        settings = vars(config)
        own.moe_layer_freq = [layers_of(settings)[like]]
        own.window_attn_skip_freq = [layers_but_full(settings, "window_attn_skip_freq", unset=1)[like]]
        own.no_rope_freq = [layers_without_rope(settings)[like]]
    return own


def inner_letters(config: TransformerConfig) -> str:
    """The letters of the layer within an MTP layer."""
    return letters_of(inner_config(config))[-1]


def letters_of(config: TransformerConfig) -> tuple[str, ...]:
    """The letters of each layer, in the order of its halves.

    They are "M" (Mamba-2), "C" (a short convolution), "G" (the gated delta rule), "*" (attention), "+" (latent
    attention), "D" (latent attention over selected tokens), "-" (MLP) and "E" (experts).
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
