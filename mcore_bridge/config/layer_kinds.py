"""The kind of each layer: with experts, full attention or a rope; also of layers for multi-token prediction (MTP).

megatron-core's ``HybridModel`` has a letter for each kind of layer.

Layers may also have different sizes. ``per_layer_config`` of a config has, for each layer, the fields that differ in
this layer. A layer is built from the config that ``layer_config`` gives. All code that needs a size of a layer reads it
there. If the layer has the sizes of the model, this config is the config of the model.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mcore_bridge.config.fields import Mcore, per_layer

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig
    from transformers import PretrainedConfig


FIRST, SECOND = frozenset("MCK*"), frozenset("-E")
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


def selects_keys(mcore: Mcore) -> bool:
    """Whether attention has indexers of ours: megatron-core's are latent, with neither sinks nor pools nor blocks."""
    ours = (mcore.get(name) for name in ("dsa_indexer_block", "dsa_indexer_pool"))
    selects = bool(mcore.get("multi_latent_attention")) or any(size is not None for size in ours)
    return (
        selects and mcore.get("dsa_indexer_topk") is not None and mcore.get("experimental_attention_variant") != "dsa"
    )


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
        own.layer_kinds, own.moe_layer_freq, own.per_layer_config = (kinds,), [int("E" in kinds)], None
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

    They are "M" (Mamba-2), "C" (a short convolution), "K" (Kimi delta attention), "G" (the gated delta rule), "*"
    (attention), "+" (latent attention), "D" (latent attention over selected tokens), "-" (MLP) and "E" (experts).
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


class SizedByLayer:
    """A config that megatron-core's ``TransformerBlock`` asks for the config of each layer.

    With ``heterogeneous_block_specs`` the block does so, and gives each layer its own keys in checkpoints. The configs
    of megatron-core's ``HeterogeneousTransformerConfig`` differ in KV heads and sizes of MLPs alone.
    """

    def get_config_for_layer(self, layer_number: int) -> Any:
        """The config of a layer, which megatron-core numbers from 1."""
        own: Any = self
        return layer_config(own, layer_number - 1)

    def __reduce__(self) -> tuple[Any, ...]:  # pickle finds no class that was made at run time
        return _with_values, (type(self).__bases__[1], dict(vars(self)))


@functools.cache
def sized_by_layer(config_class: type) -> type:
    """The subclass of a config class for models whose layers have sizes of their own."""
    return type(f"SizedByLayer{config_class.__name__}", (SizedByLayer, config_class), {})


def _with_values(config_class: type, values: dict[str, Any]) -> TransformerConfig:
    config: Any = object.__new__(sized_by_layer(config_class))
    vars(config).update(values)
    return config


def value_channels(mcore: Mcore) -> int:
    """The width of a head's values, in rows of its projection: 0 if values are keys, and usually the width of keys."""
    own: Any = 0 if mcore.get("keys_as_values") else mcore.get("value_channels") or mcore.get("kv_channels")
    return own or 0


def _own(mcore: Mcore) -> LayerSizes:
    own: Any = mcore.get("per_layer_config")
    return own or ()
