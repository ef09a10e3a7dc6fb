"""Entries of config tables for sizes that differ between layers, and for gates behind attention."""

from torch.nn.functional import silu

from mcore_bridge.config.fields import Const, Derive, Hf, Mcore, Require, count, is_number
from mcore_bridge.config.layer_kinds import sizes_by_layer, values_of_layers
from mcore_bridge.config.rope_spelling import FULL, SLIDING
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


def _sources(hf: Hf) -> list[int | None]:
    """For each layer the layer whose keys and values it reads, which may be itself; None if it shares none."""
    kinds, shared = hf["layer_types"], hf.get("num_kv_shared_layers") or 0
    assert isinstance(kinds, list)
    if not isinstance(shared, int) or not 0 <= shared < len(kinds) or {*kinds[: len(kinds) - shared]} != {*kinds}:
        raise ConfigError(
            "num_kv_shared_layers must leave a layer of each kind, whose keys the last layers read, found "
            f"{shown(shared)} for the kinds {shown(kinds)}. Correct one of them."
        )
    if shared and not hf.get("hidden_size_per_layer_input"):
        raise ConfigError(
            f"num_kv_shared_layers must be 0 without hidden_size_per_layer_input, found {shared}: transformers fails."
        )
    first = len(kinds) - shared
    read = [first - 1 - kinds[first - 1 :: -1].index(kind) for kind in kinds[first:]]
    return [number if number in read else None for number in range(first)] + read


def _heads_of_kinds(hf: Hf) -> dict[str, object]:
    usual = {"keys_as_values": False, "keys_of_layer": None, "value_norm": True}
    sliding = {**derived.HEADS.forward(hf), **usual}
    full = {**sliding, **derived.HEADS.forward(full_layers(hf)), "keys_as_values": bool(hf.get("attention_k_eq_v"))}
    kinds, sources, width = hf["layer_types"], _sources(hf), count(hf, "intermediate_size")
    assert isinstance(kinds, list)
    reader = {"keys_as_values": False, "value_norm": False}
    wide = {"ffn_hidden_size": 2 * width} if hf.get("use_double_wide_mlp") else {}
    layers = [
        {
            **(full if kind == FULL else sliding),
            "keys_of_layer": source,
            **({**reader, **wide} if source not in (None, number) else {}),
        }
        for number, (kind, source) in enumerate(zip(kinds, sources, strict=True))
    ]
    return {**sliding, _OWN: sizes_by_layer(layers, {**sliding, "ffn_hidden_size": width})}


def _numbered(layer: int, num_layers: int) -> str:
    """The key of a layer in ``per_layer_config``, as transformers writes it."""
    return str(layer).zfill(len(str(num_layers - 1)))


def _heads_of_kinds_back(mcore: Mcore) -> dict[str, object]:
    num_layers = count(mcore, "num_layers")
    of_layers = {hf: values_of_layers(mcore, name, num_layers) for hf, name in _SIZES.items()}
    model, own = derived.HEADS.backward(mcore), {}
    for number in range(num_layers):
        sizes = {name: values[number] for name, values in of_layers.items() if values[number] != model[name]}
        if sizes:
            own[_numbered(number, num_layers)] = sizes
    shares = any(values_of_layers(mcore, "keys_as_values", num_layers))
    return {**model, _OWN: own, "attention_k_eq_v": shares}


def _sharing_back(mcore: Mcore) -> dict[str, object]:
    num_layers = count(mcore, "num_layers")
    sources, widths = (values_of_layers(mcore, name, num_layers) for name in ("keys_of_layer", "ffn_hidden_size"))
    readers = [number for number, source in enumerate(sources) if source not in (None, number)]
    wide = any(widths[number] != mcore["ffn_hidden_size"] for number in readers)
    sharing = {"num_kv_shared_layers": len(readers), "use_double_wide_mlp": wide}
    return {**_heads_of_kinds_back(mcore), **sharing}


HEADS_OF_FULL = Derive(
    (*derived.HEADS.names, _OWN, "attention_k_eq_v"),
    _heads_of_kinds,
    _heads_of_kinds_back,
    ("`per_layer_config` with other fields than sizes of heads, or of layers with a window",),
)
"""Full layers may have heads of another size, another number of KV heads, and keys as values."""
HEADS_AND_SHARED_KEYS = Derive(
    (*HEADS_OF_FULL.names, "num_kv_shared_layers", "use_double_wide_mlp"),
    _heads_of_kinds,
    _sharing_back,
    (*HEADS_OF_FULL.refuses, "`num_kv_shared_layers` without `hidden_size_per_layer_input`: transformers fails"),
)
"""As ``HEADS_OF_FULL``. The last layers may also read keys and values of earlier ones, and then have wider MLPs."""


def _layer_inputs(hf: Hf) -> dict[str, object]:
    size, vocabulary = hf.get("hidden_size_per_layer_input") or None, hf.get("vocab_size_per_layer_input")
    if size is not None and vocabulary != hf["vocab_size"]:
        raise ConfigError(
            f"vocab_size_per_layer_input must be vocab_size={hf['vocab_size']}, found {shown(vocabulary)}: the "
            "embedding of hidden_size_per_layer_input is padded alike. Correct one of them."
        )
    return {"layer_input_size": size}


def _layer_inputs_back(mcore: Mcore) -> dict[str, object]:
    size, vocabulary = mcore["layer_input_size"], derived.VOCAB.backward(mcore)["vocab_size"]
    return {"hidden_size_per_layer_input": size or 0, **({"vocab_size_per_layer_input": vocabulary} if size else {})}


LAYER_INPUTS = Derive(
    ("hidden_size_per_layer_input", "vocab_size_per_layer_input"),
    _layer_inputs,
    _layer_inputs_back,
    ("`vocab_size_per_layer_input` other than `vocab_size`: both embeddings are padded alike",),
)
"""Each layer may have an input from a second embedding."""


_OF_WINDOWS = "num_sliding_attention_heads"
_LIMITS = {"swiglu_limits": "expert_glu_limit", "swiglu_limits_shared": "glu_limit"}


def _is_limit(value: object) -> bool:
    return value is None or (is_number(value) and value >= 0)


def _limits(hf: Hf, name: str) -> list[object]:
    """The limit of each layer under ``name``, which is None if a layer has none."""
    num_layers, limits = count(hf, "num_hidden_layers"), hf.get(name)
    if limits is None:
        return [None] * num_layers
    if not isinstance(limits, list) or len(limits) < num_layers or not all(map(_is_limit, limits)):
        raise ConfigError(
            f"{name} must be None, or have a positive number, or 0 or None for no limit, for each of the {num_layers} "
            f"layers, found {shown(limits)}."
        )
    return [limit or None for limit in limits[:num_layers]]


def _one_limit(hf: Hf) -> dict[str, object]:
    limit = hf.get("swiglu_limit")
    if not (is_number(limit) and limit > 0):
        raise ConfigError(f"swiglu_limit must be a positive number, found {shown(limit)}. Correct the HF config.")
    return dict.fromkeys(_LIMITS.values(), limit)


ONE_LIMIT = Derive(("swiglu_limit",), _one_limit, lambda mcore: {"swiglu_limit": mcore["glu_limit"]})
"""The limit of the gates of all MLPs and experts."""


def _heads_and_limits(hf: Hf) -> dict[str, object]:
    model = {**derived.HEADS.forward(hf), **dict.fromkeys(_LIMITS.values())}
    own, kinds, heads = hf.get(_OWN) or {}, hf.get("layer_types"), hf.get(_OF_WINDOWS) or hf["num_attention_heads"]
    if not isinstance(own, dict) or not isinstance(kinds, list):
        raise ConfigError(f"{_OWN} must be a mapping and layer_types a list, found {shown(own)} and {shown(kinds)}.")
    plain = {"num_attention_heads": hf["num_attention_heads"]}
    wanted = [{"num_attention_heads": heads} if kind == SLIDING else plain for kind in kinds]
    numbered = {int(number): layer for number, layer in own.items()}
    if any({**plain, **numbered.get(number, {})} != layer for number, layer in enumerate(wanted)):
        raise ConfigError(
            f"{_OWN} must have {_OF_WINDOWS}={shown(heads)} as num_attention_heads of every layer with a window, and "
            f"nothing else, found {shown(own)}. Correct one of them."
        )
    limits = {mcore: _limits(hf, name) for name, mcore in _LIMITS.items()}
    layers = [
        {**derived.HEADS.forward({**hf, **layer}), **{name: values[number] for name, values in limits.items()}}
        for number, layer in enumerate(wanted[: count(hf, "num_hidden_layers")])
    ]
    return {**model, _OWN: sizes_by_layer(layers, model)}


def _heads_and_limits_back(mcore: Mcore) -> dict[str, object]:
    num_layers, model = count(mcore, "num_layers"), derived.HEADS.backward(mcore)
    heads = values_of_layers(mcore, "num_attention_heads", num_layers)
    usual = model["num_attention_heads"]
    own = {
        _numbered(number, num_layers): {"num_attention_heads": size}
        for number, size in enumerate(heads)
        if size != usual
    }
    other = next((layer["num_attention_heads"] for layer in own.values()), usual)
    limits = {name: values_of_layers(mcore, attribute, num_layers) for name, attribute in _LIMITS.items()}
    return {
        **model,
        _OF_WINDOWS: other,
        _OWN: own,
        **{name: [limit or 0.0 for limit in values] if any(values) else None for name, values in limits.items()},
    }


HEADS_AND_LIMITS = Derive(
    (*derived.HEADS.names, _OF_WINDOWS, _OWN, *_LIMITS),
    _heads_and_limits,
    _heads_and_limits_back,
    ("`per_layer_config` with other fields than the query heads of layers with a window",),
)
"""Layers with a window may have another number of query heads, and layers limits of gates, of experts and of others."""
_WIDTH, _SCALE = "v_head_dim", "attention_value_scale"


def _values_and_sinks(hf: Hf) -> dict[str, object]:
    scale, full = hf.get(_SCALE), {**derived.HEADS.forward(hf), "softmax_type": "vanilla"}
    twice = {**hf, "num_key_value_heads": 2 * count(full, "num_query_groups")}
    windowed, kinds = {**derived.HEADS.forward(twice), "softmax_type": "learnable"}, hf["layer_types"]
    assert isinstance(kinds, list)
    layers = sizes_by_layer((windowed if kind == SLIDING else full for kind in kinds), full)
    values = {"value_channels": count(hf, _WIDTH), "value_scale": 1.0 if scale is None else scale}
    return {**full, **values, _OWN: layers}


def _values_and_sinks_back(mcore: Mcore) -> dict[str, object]:
    return {**derived.HEADS.backward(mcore), _WIDTH: mcore["value_channels"], _SCALE: mcore["value_scale"]}


VALUES_AND_SINKS = Derive((*derived.HEADS.names, _WIDTH, _SCALE), _values_and_sinks, _values_and_sinks_back)
"""Values have a width and a scale of their own. Layers with a window have sinks and twice as many KV heads."""
SILU = (
    Const("activation_func", silu),
    Require("hidden_act", ("silu",), "limits behind another activation are not written"),
)
