"""Entries of config tables for models with different ropes in different layers, or with a rope in only some layers."""

from mcore_bridge.config.fields import Derive, Hf, Mcore
from mcore_bridge.config.rope import Rope
from mcore_bridge.config.rope_spelling import FULL, SLIDING, merged, of_layers, spelled_by_layer
from mcore_bridge.config.tables import derived
from mcore_bridge.config.tables.derived_rope import ROPE
from mcore_bridge.errors import ConfigError


def _ropes(hf: Hf) -> dict[str, object]:
    layers = of_layers(hf) or _layers_of_4(hf)
    return {**ROPE.forward(layers[FULL]), "hf_sliding_rope": ROPE.forward(layers[SLIDING])["hf_rope"]}


def _layers_of_4(hf: Hf) -> dict[str, Hf]:
    """``hf`` for each kind of layer, as transformers 4 reads it: only the rope of full layers is scaled."""
    theta, local = merged(hf)["rope_theta"], hf.get("rope_local_base_freq")
    plain = {"rope_parameters": None, "rope_scaling": None, "rope_theta": theta if local is None else local}
    return {FULL: hf, SLIDING: {**hf, **plain}}


def _ropes_back(mcore: Mcore) -> dict[str, object]:
    full, sliding = mcore["hf_rope"], mcore["hf_sliding_rope"]
    assert isinstance(full, Rope)
    assert isinstance(sliding, Rope)
    return spelled_by_layer(full.parameters, sliding.parameters)


def _ropes_of_one_base(hf: Hf) -> dict[str, object]:
    ropes = _ropes(hf)
    _require_one_base(ropes["rotary_base"], hf.get("rope_local_base_freq"))
    return ropes


def _ropes_of_one_base_back(mcore: Mcore) -> dict[str, object]:
    fields = _ropes_back(mcore)
    _require_one_base(mcore["rotary_base"], fields.pop("rope_local_base_freq", None))
    return fields


def _require_one_base(theta: object, local: object) -> None:
    if local not in (None, theta):
        raise ConfigError(
            f"With transformers 4, rope_theta must be the same for all layers, found {theta!r}, and {local!r} for "
            "sliding layers. Install transformers 5."
        )


def _window_or_nope(hf: Hf) -> dict[str, object]:
    windows = derived.WINDOWS.forward(hf)
    if (hf.get("sliding_window") is None) != (windows["window_size"] is None):
        raise ConfigError(
            f"sliding_window={hf.get('sliding_window')!r} must come with a sliding layer, but layer_types has none: "
            "no layer of transformers would have a rope. Set sliding_window to None for a rope in all layers."
        )
    return {**windows, "no_rope_freq": _unrotated(windows)}


def _window_or_nope_back(mcore: Mcore) -> dict[str, object]:
    expected = _unrotated(mcore)
    if mcore["no_rope_freq"] != expected:
        raise ConfigError(
            f"no_rope_freq must be {expected}, found {mcore['no_rope_freq']!r}: in this architecture a layer without "
            "a window has no rope if other layers have a window. Remove the override."
        )
    return derived.WINDOWS.backward(mcore)


def _unrotated(mcore: Mcore) -> list[int] | None:
    slides = mcore["window_attn_skip_freq"]
    return [1 - slide for slide in slides] if isinstance(slides, list) else None


_TWO_BASES = "another `rope_theta` for layers that slide: transformers 4 has one for this model"
_NOWHERE = "`sliding_window` where no layer slides: transformers would not rotate any layer"
_NAMES = ("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor")
# fmt: off
LAYER_ROPES          = Derive(_NAMES, _ropes, _ropes_back, ROPE.refuses)
LAYER_ROPES_ONE_BASE = Derive(_NAMES, _ropes_of_one_base, _ropes_of_one_base_back, (*ROPE.refuses, _TWO_BASES))
WINDOW_OR_NOPE       = Derive(
    derived.WINDOWS.names, _window_or_nope, _window_or_nope_back, (*derived.WINDOWS.refuses, _NOWHERE)
)
# fmt: on
