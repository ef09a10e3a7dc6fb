"""Layers for multi-token prediction (MTP): how many a model holds, and of which kind they are."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mcore_bridge.config.hybrid_layers import letters_of

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

KINDS = ("*", "*-", "*E")
"""What an MTP layer may consist of, if the config says it: attention, and an MLP or experts behind it."""


def held_mtp_layers(settings: Mapping[str, Any]) -> int:
    """The MTP layers that a model holds. One that is repeated has the weights of all its predictions.

    Args:
        settings: ``TransformerConfig`` fields by name, or overrides of them.
    """
    predictions: int = settings.get("mtp_num_layers") or 0
    return min(predictions, 1) if settings.get("mtp_use_repeated_layer") else predictions


def inner_config(config: TransformerConfig) -> TransformerConfig:
    """A config whose last layer is of the kind that the layers within MTP layers are."""
    kinds = getattr(config, "mtp_kinds", None)
    if kinds is None:
        return config  # they are like the last layer of the decoder
    own: Any = copy.copy(config)
    own.num_layers, own.layer_kinds, own.moe_layer_freq = 1, (kinds,), [int("E" in kinds)]
    return own


def inner_letters(config: TransformerConfig) -> str:
    """The letters of the layer within an MTP layer."""
    return letters_of(inner_config(config))[-1]
