"""Sizes of single layers. ``per_layer_config`` of a config has, for each layer, the fields that differ in this layer.

A layer is built from the config that ``layer_config`` gives. All code that needs a size of a layer reads it there, so
layers of one size are the special case in which this config is the config of the model. megatron-core asks a config for
these configs, too (``sized_by_layer.py``).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mcore_bridge.config.fields import Mcore

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

LayerSizes = tuple[Mapping[str, object], ...]
"""For each layer the mcore names, with their values, in which it differs from the model."""


def sizes_by_layer(layers: Iterable[Mapping[str, object]], model: Mcore) -> LayerSizes | None:
    """What is left of the values of each layer without the values that ``model`` has; None if nothing is left.

    >>> sizes_by_layer([{"kv_channels": 8}, {"kv_channels": 16}], {"kv_channels": 8})
    ({}, {'kv_channels': 16})
    """
    own = tuple({name: value for name, value in layer.items() if value != model[name]} for layer in layers)
    return own if any(own) else None


def values_of_layers(mcore: Mcore, name: str, num_layers: int) -> list[object]:
    """The value that each layer has under an mcore name: its own, or the value of the model."""
    by_layer = _own(mcore) or ({},) * num_layers
    return [own.get(name, mcore[name]) for own in by_layer[:num_layers]]


def each_size(mcore: Mcore) -> Iterator[Mcore]:
    """Yield ``mcore`` for each kind of layer: with the sizes of the model, and with the sizes of layers that differ."""
    yield mcore
    kinds: list[Mapping[str, object]] = []
    for own in _own(mcore):
        if own and own not in kinds:
            kinds.append(own)
            yield {**mcore, **own}


def layer_config(config: TransformerConfig, number: int) -> TransformerConfig:
    """The config of layer ``number`` (from 0). It is ``config`` itself if the layer has the sizes of the model."""
    by_layer = _own(vars(config))
    if not by_layer or not by_layer[number]:
        return config
    own = copy.copy(config)
    vars(own).update(by_layer[number])
    return own


def _own(mcore: Mcore) -> LayerSizes:
    own: Any = mcore.get("per_layer_config")
    return own or ()
