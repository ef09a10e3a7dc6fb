"""Entries of the config table of Inkling: two kinds of attention, and a vocabulary whose padding has no logits."""

from mcore_bridge.config.fields import Derive, Hf, Mcore, count, is_number
from mcore_bridge.config.layer_kinds import layers_but_full, sizes_by_layer
from mcore_bridge.config.tables import derived
from mcore_bridge.errors import ConfigError, shown

_KINDS = ("hybrid", "hybrid_sliding")
_SIZES = ("num_attention_heads", "num_key_value_heads", "head_dim")
_GROWTH = ("log_scaling_alpha", "log_scaling_n_floor")
_WINDOW = "sliding_window_size"


def _slides(hf: Hf) -> list[int]:
    kinds, num_layers = hf.get("layer_types"), count(hf, "num_hidden_layers")
    if not isinstance(kinds, list) or len(kinds) != num_layers or set(kinds) - set(_KINDS):
        raise ConfigError(f"layer_types must be one of {_KINDS} for each of {num_layers} layers, found {shown(kinds)}.")
    return [_KINDS.index(kind) for kind in kinds]


def _scaled(heads: dict[str, object]) -> dict[str, object]:
    """Sizes of attention with their factor of scores: queries and keys are normed, and it is 1 / dim."""
    return {**heads, "softmax_scale": 1 / count(heads, "kv_channels")}


def _attention(hf: Hf) -> dict[str, object]:
    slides, window, (alpha, floor) = _slides(hf), count(hf, _WINDOW), (hf.get(name) for name in _GROWTH)
    if not is_number(alpha) or not (floor is None or (is_number(floor) and floor > 0)):
        raise ConfigError(
            f"{_GROWTH[0]} must be a number, and {_GROWTH[1]} None or a positive number, found {shown(alpha)} and "
            f"{shown(floor)}. Correct the HF config."
        )
    growth = None if floor is None else (alpha, floor)
    full = {"relative_extent": count(hf, "rel_extent"), "query_growth": growth, **_scaled(derived.HEADS.forward(hf))}
    others = _scaled(derived.HEADS.forward({**hf, **{name: hf[f"swa_{name}"] for name in _SIZES}}))
    sliding = {"relative_extent": window, "query_growth": None, **others}
    return {
        **full,
        "relative_profiles": count(hf, "d_rel"),
        "window_size": (window - 1, 0) if any(slides) else None,
        "window_attn_skip_freq": slides if any(slides) and not all(slides) else None,
        "per_layer_config": sizes_by_layer((sliding if slide else full for slide in slides), full),
    }


def _attention_back(mcore: Mcore) -> dict[str, object]:
    """Sizes of layers with a window are left out if there is no such layer."""
    slides, own = layers_but_full(mcore, "window_attn_skip_freq", unset=1), mcore["per_layer_config"]
    kinds = [_KINDS[bool(slide and mcore["window_size"])] for slide in slides]
    growth = mcore["query_growth"]
    assert isinstance(growth, tuple | None)
    fields = {
        **derived.HEADS.backward(mcore),
        **({"log_scaling_n_floor": None} if growth is None else dict(zip(_GROWTH, growth, strict=True))),
        "d_rel": mcore["relative_profiles"],
        "rel_extent": mcore["relative_extent"],
        "layer_types": kinds,
    }
    if _KINDS[1] not in kinds:
        return fields
    assert isinstance(own, tuple | None)
    sliding = {**mcore, **(own[kinds.index(_KINDS[1])] if own else {})}
    window = sliding["relative_extent"]
    if mcore["window_size"] != (count(sliding, "relative_extent") - 1, 0):
        raise ConfigError(
            f"window_size must be ({shown(window)} - 1, 0), the distances with scores in layers with a window, found "
            f"{shown(mcore['window_size'])}. Remove the override; set {_WINDOW} in the HF config."
        )
    return {**fields, _WINDOW: window, **{f"swa_{name}": v for name, v in derived.HEADS.backward(sliding).items()}}


ATTENTION = Derive(
    (*_SIZES, *(f"swa_{name}" for name in _SIZES), "d_rel", "rel_extent", _WINDOW, "layer_types", *_GROWTH),
    _attention,
    _attention_back,
    ("`layer_types` other than `hybrid` and `hybrid_sliding`: transformers has no other",),
)
"""Heads, window and scores by distance, in layers with a window and in others; their queries may grow."""


def _vocab(hf: Hf) -> dict[str, object]:
    unpadded = hf.get("unpadded_vocab_size")
    return {**derived.VOCAB.forward(hf), "unpadded_vocab_size": unpadded and count(hf, "unpadded_vocab_size")}


def _vocab_back(mcore: Mcore) -> dict[str, object]:
    return {**derived.VOCAB.backward(mcore), "unpadded_vocab_size": mcore["unpadded_vocab_size"]}


VOCAB = Derive(("vocab_size", "unpadded_vocab_size"), _vocab, _vocab_back)
"""Tokens from ``unpadded_vocab_size`` on have no logits."""
