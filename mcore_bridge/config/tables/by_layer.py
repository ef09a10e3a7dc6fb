"""Entries of config tables for sizes that differ between layers, and for gates behind attention."""

from mcore_bridge.config.fields import Const, Derive, Hf, Mcore, count
from mcore_bridge.config.layer_kinds import sizes_by_layer, values_of_layers
from mcore_bridge.config.tables import derived
from mcore_bridge.errors import ConfigError, shown

_PER_LAYER = "num_attention_heads_per_layer"


def _query_heads(hf: Hf) -> dict[str, object]:
    model, num_layers = derived.HEADS.forward(hf), count(hf, "num_hidden_layers")
    heads = [model["num_attention_heads"]] * num_layers if hf.get(_PER_LAYER) is None else hf[_PER_LAYER]
    if not isinstance(heads, list) or len(heads) != num_layers:
        raise ConfigError(f"{_PER_LAYER} must have a number for each of the {num_layers} layers, found {shown(heads)}.")
    layers = [derived.HEADS.forward({**hf, "num_attention_heads": number}) for number in heads]
    return {**model, "per_layer_config": sizes_by_layer(layers, model)}


def _query_heads_back(mcore: Mcore) -> dict[str, object]:
    heads = values_of_layers(mcore, "num_attention_heads", count(mcore, "num_layers"))
    return {**derived.HEADS.backward(mcore), _PER_LAYER: heads}


QUERY_HEADS = Derive((*derived.HEADS.names, _PER_LAYER), _query_heads, _query_heads_back)
"""Layers may have different numbers of query heads."""


_GATES = {"per-head": "head", "per-element": "element"}


def _gating(hf: Hf) -> dict[str, object]:
    gating = hf.get("gating", True)
    gates = "head" if gating is True else _GATES.get(str(gating))
    if gates is None:
        raise ConfigError(f"gating must be True, 'per-head' or 'per-element', found {shown(gating)}.")
    return {"attention_gate": gates}


def _gating_back(mcore: Mcore) -> dict[str, object]:
    return {"gating": f"per-{mcore['attention_gate']}"}


GATING = (
    Derive(("gating",), _gating, _gating_back, ("`gating=False`: transformers has gates for any value",)),
    Const("attention_gate_activation", "softplus"),
)
"""Gates of Laguna, whose activation is softplus."""
ELEMENT_GATES = (Const("attention_gate", "element"), Const("attention_gate_activation", "sigmoid"))
"""A sigmoid for each element, as in megatron-core, by a projection of its own."""
