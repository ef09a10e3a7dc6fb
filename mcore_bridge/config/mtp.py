"""Layers for multi-token prediction (MTP): their number in a model, and their kinds."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mcore_bridge.config.hybrid_layers import letters_of

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

KINDS = ("*", "*-", "*E")
"""The possible parts of an MTP layer, if the config lists them: attention, optionally followed by an MLP or experts."""


def held_mtp_layers(settings: Mapping[str, Any]) -> int:
    """The number of MTP layers that a model holds. A repeated layer holds one set of weights for all its predictions.

    Args:
        settings: ``TransformerConfig`` fields by name, or overrides of them.
    """
    predictions: int = settings.get("mtp_num_layers") or 0
    return min(predictions, 1) if settings.get("mtp_use_repeated_layer") else predictions


def inner_config(config: TransformerConfig) -> TransformerConfig:
    """A config whose last layer has the kind of the layers within MTP layers."""
    kinds = getattr(config, "mtp_kinds", None)
    if kinds is None:
        return config  # they are like the last layer of the decoder
    own: Any = copy.copy(config)
    own.num_layers, own.layer_kinds, own.moe_layer_freq = 1, (kinds,), [int("E" in kinds)]
    return own


def inner_letters(config: TransformerConfig) -> str:
    """The letters of the layer within an MTP layer."""
    return letters_of(inner_config(config))[-1]
