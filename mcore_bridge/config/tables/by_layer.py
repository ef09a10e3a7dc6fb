"""Entries of config tables for sizes that differ between layers, and for gates behind attention."""

from mcore_bridge.config.fields import Const, Derive, Hf, Mcore, count
from mcore_bridge.config.layer_kinds import sizes_by_layer, values_of_layers
from mcore_bridge.config.rope_spelling import FULL
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
HEAD_GATES = (Const("attention_gate", "head"), Const("attention_gate_activation", "sigmoid"))
"""A sigmoid for each head."""
ELEMENT_GATES = (Const("attention_gate", "element"), Const("attention_gate_activation", "sigmoid"))
"""A sigmoid for each element, as in megatron-core, by a projection of its own."""


_OWN = "per_layer_config"
_SIZES = {"head_dim": "kv_channels", "num_key_value_heads": "num_query_groups"}


def full_layers(hf: Hf) -> Hf:
    """``hf`` with the sizes of heads in its full layers.

    Raises:
        ConfigError: not all full layers have these sizes, or another layer has sizes of its own.
    """
    own, kinds = hf.get(_OWN) or {}, hf.get("layer_types")
    if not isinstance(own, dict) or not isinstance(kinds, list):
        raise ConfigError(f"{_OWN} must be a mapping and layer_types a list, found {shown(own)} and {shown(kinds)}.")
    full = {number for number, kind in enumerate(kinds) if kind == FULL}
    sizes: dict[str, object] = next(iter(own.values()), {})
    layers = {int(number): layer for number, layer in own.items() if int(number) < len(kinds)}
    if layers and (layers.keys() != full or any(layer != sizes for layer in own.values()) or sizes.keys() - _SIZES):
        raise ConfigError(
            f"{_OWN} must have equal values of {sorted(_SIZES)} for every full layer, and none for another layer, "
            f"found {shown(own)}. Correct global_head_dim, num_global_key_value_heads or {_OWN}."
        )
    return {**hf, **sizes}


def _heads_of_kinds(hf: Hf) -> dict[str, object]:
    sliding = {**derived.HEADS.forward(hf), "keys_as_values": False}
    shares = bool(hf.get("attention_k_eq_v"))
    full, kinds = {**derived.HEADS.forward(full_layers(hf)), "keys_as_values": shares}, hf["layer_types"]
    assert isinstance(kinds, list)
    return {**sliding, _OWN: sizes_by_layer((full if kind == FULL else sliding for kind in kinds), sliding)}


def _heads_of_kinds_back(mcore: Mcore) -> dict[str, object]:
    num_layers = count(mcore, "num_layers")
    of_layers = {hf: values_of_layers(mcore, name, num_layers) for hf, name in _SIZES.items()}
    model, own = derived.HEADS.backward(mcore), {}
    for number in range(num_layers):
        sizes = {name: values[number] for name, values in of_layers.items() if values[number] != model[name]}
        if sizes:
            own[str(number).zfill(len(str(num_layers - 1)))] = sizes
    shares = any(values_of_layers(mcore, "keys_as_values", num_layers))
    return {**model, _OWN: own, "attention_k_eq_v": shares}


HEADS_OF_FULL = Derive(
    (*derived.HEADS.names, _OWN, "attention_k_eq_v"),
    _heads_of_kinds,
    _heads_of_kinds_back,
    ("`per_layer_config` with other fields than sizes of heads, or of layers with a window",),
)
"""Full layers may have heads of another size, another number of KV heads, and keys as values."""
