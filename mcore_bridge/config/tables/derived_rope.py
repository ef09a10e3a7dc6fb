"""Entries of config tables about positions: the ropes that a family supports, and layers with another rope or none."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from mcore_bridge.config.fields import Const, Derive, Hf, Ignore, Mcore, count, is_number
from mcore_bridge.config.layer_kinds import layers_but_full, layers_without_rope
from mcore_bridge.config.rope import Rope, head_dim, rope_from
from mcore_bridge.config.rope_spelling import (
    DEFAULT_THETA,
    FULL,
    MULTIMODAL,
    ORIGINAL_LENGTH,
    ROPE_TYPES,
    SLIDING,
    merged,
    of_layers,
    spelled,
    spelled_by_layer,
)
from mcore_bridge.config.tables import derived
from mcore_bridge.config.tables.by_layer import full_layers
from mcore_bridge.errors import ConfigError, shown

_OF_YARN = ("llama_4_scaling_beta", "max_position_embeddings")
_OWN = ("partial_rotary_factor", *_OF_YARN, *MULTIMODAL)
"""Rope parameters that only some families support. In others, transformers ignores them or fails."""


def rope(types: tuple[str, ...] = ROPE_TYPES, own: tuple[str, ...] = ()) -> Derive:
    """The entry of a family whose modelling code supports these rope ``types``, and the parameters ``own``."""
    names = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
    at_the_top = (ORIGINAL_LENGTH,) if "longrope" in types else ()

    def forward(hf: Hf) -> dict[str, object]:
        hf_rope = rope_from(hf)
        if hf_rope.rope_type not in types:
            raise ConfigError(
                f"The rope type must be one of {sorted(types)} in this family, found {hf_rope.rope_type!r}."
            )
        if unknown := {
            name: hf_rope.parameters[name] for name in _OWN if name in hf_rope.parameters and name not in own
        }:
            raise ConfigError(
                f"The rope must not have {unknown}: the modelling code of this family does not support it. Delete it, "
                "if the model was trained without it."
            )
        return {"hf_rope": hf_rope, "rotary_base": hf_rope.theta, "rotary_percent": hf_rope.partial_rotary_factor}

    def backward(mcore: Mcore) -> dict[str, object]:
        hf_rope = mcore["hf_rope"]
        assert isinstance(hf_rope, Rope)
        partial = {"partial_rotary_factor": hf_rope.partial_rotary_factor} if "partial_rotary_factor" in own else {}
        return spelled(
            {**hf_rope.parameters, **partial}
        )  # written even if it is 1, because some families have another default

    known = ", ".join(f"`{name}`" for name in types)
    possible = (name for name in _OWN if "yarn" in types or name not in _OF_YARN)
    unread = ", ".join(f"`{name}`" for name in possible if name not in own)
    refuses = (
        f"rope types other than {known}: transformers computes no other in this family, or we do not reproduce it",
        f"{unread} of a rope: the modelling code does not reproduce it",
    )
    return Derive((*names, *at_the_top), forward, backward, refuses[: 2 if unread else 1])


def _rotary_back(mcore: Mcore) -> dict[str, object]:
    """The HF fields of a partial rope. GPT-NeoX of transformers 4 derives other fields from two of them at every
    read.
    """
    fields = _PARTIAL.backward(mcore)
    if "rope_theta" not in fields:
        return fields
    return {**fields, "rotary_emb_base": fields["rope_theta"], "rotary_pct": fields["partial_rotary_factor"]}


def _no_rope(hf: Hf) -> dict[str, object]:
    rotated, num_layers = hf.get("no_rope_layers"), count(hf, "num_hidden_layers")
    if not isinstance(rotated, list) or len(rotated) < num_layers or set(rotated) - {0, 1}:
        raise ConfigError(
            f"no_rope_layers must have a 1 (rope) or a 0 (none) for each of the {num_layers} layers, found {rotated!r}."
        )
    skipped = [1 - int(layer) for layer in rotated[:num_layers]]
    return {"no_rope_freq": skipped if any(skipped) else None}


def _no_rope_back(mcore: Mcore) -> dict[str, object]:
    return {"no_rope_layers": [1 - layer for layer in layers_without_rope(mcore)]}


def _bases(hf: Hf) -> dict[str, object]:
    bases, num_layers, theta = hf.get("layer_rope_theta"), count(hf, "num_hidden_layers"), rope_from(hf).theta
    if not isinstance(bases, list) or len(bases) < num_layers or any(base not in (0, theta) for base in bases):
        raise ConfigError(
            f"layer_rope_theta must have {theta} (rope) or 0 (none) for each of the {num_layers} layers, found "
            f"{shown(bases)}: transformers rotates all layers by rope_theta. Correct it, or rope_theta."
        )
    skipped = [int(base == 0) for base in bases[:num_layers]]
    return {"no_rope_freq": skipped if any(skipped) else None}


def _bases_back(mcore: Mcore) -> dict[str, object]:
    rope = mcore["hf_rope"]
    assert isinstance(rope, Rope)
    return {"layer_rope_theta": [0 if skipped else rope.theta for skipped in layers_without_rope(mcore)]}


def _rotary_dim(hf: Hf) -> dict[str, object]:
    given, expected = hf.get("rotary_dim"), rope_from(hf).rotary_dim
    if given not in (None, expected):
        raise ConfigError(
            f"rotary_dim must be {expected}, which follows from partial_rotary_factor, found {given!r}: published code "
            "reads only the factor. Set partial_rotary_factor to the value of training, and delete rotary_dim."
        )
    return {}


def _if_base(hf: Hf) -> dict[str, object]:
    """A rope without a base is none."""
    parameters = hf.get("rope_parameters")
    if isinstance(parameters, dict) and parameters.get("rope_theta", DEFAULT_THETA) is None:
        return {"position_embedding_type": "none"}
    return {"position_embedding_type": "rope", **ROPE.forward(hf)}


def _if_base_back(mcore: Mcore) -> dict[str, object]:
    if mcore["position_embedding_type"] == "rope":
        return ROPE.backward(mcore)
    return {"rope_parameters": {"rope_type": "default", "rope_theta": None}}


ROPE = rope()
_PARTIAL = rope(own=("partial_rotary_factor",))
_PROPORTIONAL = rope(("default", "proportional"), own=("partial_rotary_factor",))
ROTARY_ROPE = Derive(
    (*_PARTIAL.names, "rotary_pct", "rotary_emb_base"), _PARTIAL.forward, _rotary_back, _PARTIAL.refuses
)
MULTIMODAL_ROPE = rope(own=MULTIMODAL)
"""The rope of the text of a composite: without images, its three positions are equal."""
_TWO_DIMS = "`rotary_dim` other than the value from `partial_rotary_factor`: published code reads only the factor"
ROTARY_DIM = Derive(("rotary_dim",), _rotary_dim, lambda mcore: {}, (_TWO_DIMS,))
_ONE_BASE = "`layer_rope_theta` other than 0 and `rope_theta`: transformers rotates all layers by one base"
BASES = Derive(("layer_rope_theta",), _bases, _bases_back, (_ONE_BASE,))
NO_ROPE = Derive(("no_rope_layers",), _no_rope, _no_rope_back)
POSITIONS_IF_BASE = Derive(ROPE.names, _if_base, _if_base_back, ROPE.refuses)
UNROTATED = (Ignore("no layer has a rope", ROPE.names), Const("position_embedding_type", "none"))


_NAMES = ("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor")


def _with_share(hf: Hf, share: float) -> Hf:
    parameters = hf.get("rope_parameters")
    if not isinstance(parameters, dict):
        return hf
    return {**hf, "rope_parameters": {"partial_rotary_factor": share, **parameters}}


def layer_ropes(rope: Derive = ROPE, share: float | None = None) -> Derive:
    """Layers with a window have another rope than the other layers.

    Args:
        rope: the entry of a single rope.
        share: the rotated share of a head where no ``partial_rotary_factor`` says it, if it is another one than 1.
    """

    def forward(hf: Hf) -> dict[str, object]:
        layers = of_layers(hf) or _layers_of_4(hf)
        if share is not None:
            layers = {kind: _with_share(layer, share) for kind, layer in layers.items()}
        return {**rope.forward(layers[FULL]), "hf_sliding_rope": rope.forward(layers[SLIDING])["hf_rope"]}

    def backward(mcore: Mcore) -> dict[str, object]:
        fields = _ropes_back(mcore)
        ropes = fields.get("rope_parameters")
        if share is None or not isinstance(ropes, dict):
            return fields
        whole = {"partial_rotary_factor": 1.0}  # which a rope leaves out
        return {**fields, "rope_parameters": {kind: {**whole, **own} for kind, own in ropes.items()}}

    return Derive(_NAMES, forward, backward, rope.refuses)


def _proportional(hf: Hf) -> dict[str, object]:
    layers = of_layers(hf) or dict.fromkeys((FULL, SLIDING), hf)
    full, sliding = (_PROPORTIONAL.forward(layer) for layer in (full_layers(layers[FULL]), layers[SLIDING]))
    for rope in (full["hf_rope"], sliding["hf_rope"]):
        if isinstance(rope, Rope) and rope.rope_type == "default" and rope.partial_rotary_factor != 1:
            raise ConfigError(
                f"partial_rotary_factor must be 1 in a rope of type 'default', found {rope.partial_rotary_factor}: "
                "transformers does not read it there in this family. Delete it, or use the type 'proportional'."
            )
    return {**full, "hf_sliding_rope": sliding["hf_rope"]}


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
    ropes = LAYER_ROPES.forward(hf)
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
    return _windows_back(mcore, _unrotated(mcore), "has no rope if other layers have a window")


def _windows_back(mcore: Mcore, unrotated: list[int] | None, rule: str) -> dict[str, object]:
    if mcore["no_rope_freq"] != unrotated:
        raise ConfigError(
            f"no_rope_freq must be {unrotated}, found {mcore['no_rope_freq']!r}: in this architecture a layer without "
            f"a window {rule}. Remove the override."
        )
    return derived.WINDOWS.backward(mcore)


def _slides_or_nope(hf: Hf) -> dict[str, object]:
    windows = derived.WINDOWS.forward(hf)
    return {**windows, "no_rope_freq": _full({**windows, "num_layers": count(hf, "num_hidden_layers")})}


def _slides_or_nope_back(mcore: Mcore) -> dict[str, object]:
    fields = _windows_back(mcore, _full(mcore), "has no rope")
    return {name: value for name, value in fields.items() if value is not None}  # transformers needs a window anyway


def _full(mcore: Mcore) -> list[int] | None:
    """1 for each layer without a window; None if each has one."""
    slides = layers_but_full(mcore, "window_attn_skip_freq", unset=mcore["window_size"] is not None)
    return None if all(slides) else [1 - slide for slide in slides]


def _unrotated(mcore: Mcore) -> list[int] | None:
    slides = mcore["window_attn_skip_freq"]
    return [1 - slide for slide in slides] if isinstance(slides, list) else None


_TWO_BASES = "another `rope_theta` for layers that slide: transformers 4 has one for this model"
_NOWHERE = "`sliding_window` where no layer slides: transformers would not rotate any layer"
# fmt: off
LAYER_ROPES          = layer_ropes()
LAYER_ROPES_PARTIAL  = layer_ropes(_PARTIAL)
LAYER_ROPES_OF_A_THIRD = layer_ropes(_PARTIAL, 0.334)
LAYER_ROPES_PROPORTIONAL = Derive(_NAMES, _proportional, _ropes_back, (
    *_PROPORTIONAL.refuses, "`partial_rotary_factor` of a default rope: transformers does not read it there"))
LAYER_ROPES_ONE_BASE = Derive(_NAMES, _ropes_of_one_base, _ropes_of_one_base_back, (*ROPE.refuses, _TWO_BASES))
SLIDES_OR_NOPE       = Derive(
    derived.WINDOWS.names, _slides_or_nope, _slides_or_nope_back, derived.WINDOWS.refuses
)
WINDOW_OR_NOPE       = Derive(
    derived.WINDOWS.names, _window_or_nope, _window_or_nope_back, (*derived.WINDOWS.refuses, _NOWHERE)
)
# fmt: on


class ReversedRope(Rope):
    """A rope that turns the other way: its angles are negative."""

    def _computed(self, seq_len: int | None) -> tuple[torch.Tensor, float]:
        frequencies, attention_factor = super()._computed(seq_len)
        return -frequencies, attention_factor


def _reversed(hf: Hf) -> dict[str, object]:
    values = ROPE.forward(hf)
    plain = values["hf_rope"]
    assert isinstance(plain, Rope)
    turned = ReversedRope(
        parameters=plain.parameters, head_dim=plain.head_dim, max_position_embeddings=plain.max_position_embeddings
    )
    return {**values, "hf_rope": turned}


REVERSED_ROPE = Derive(ROPE.names, _reversed, ROPE.backward, ROPE.refuses)


_KEYS = ("rope_type", "rope_theta", "alpha")
_UNREAD = ("beta_fast", "beta_slow", "factor", "mscale", "mscale_all_dim")
_NUMBERS = ("rope_theta", "alpha")
_SCALING = ("seq_len_interpolation_factor", "rope_scaling", "rope_scaling_factor")


@dataclass(frozen=True, kw_only=True)
class AlphaRope(Rope):
    """A rope whose base is multiplied once by a power of ``alpha``. HunYuan calls it dynamic, but no length changes it.

    transformers 4 forgets the ``alpha`` beyond ``max_position_embeddings`` tokens, and 5 does not; here it always
    counts. It is a ``Rope`` with the parameters of ``_KEYS``, and perhaps of ``_UNREAD``, which transformers does not
    read.
    """

    @property
    def longest_plain(self) -> float:
        return math.inf

    def overridden(self, overrides: Mapping[str, object]) -> Rope:
        if given := [name for name in _SCALING if name in overrides]:
            raise ConfigError(f"The overrides {given} must be left out: this rope is scaled by alpha already.")
        theta, dim = overrides.get("rotary_base"), overrides.get("kv_channels")
        return replace(
            self,
            parameters={**self.parameters, "rope_theta": self.theta if theta is None else theta},
            head_dim=self.head_dim if dim is None else count(overrides, "kv_channels"),
        )

    def _computed(self, seq_len: int | None) -> tuple[torch.Tensor, float]:
        alpha, dim = self._number("alpha"), self.head_dim
        assert alpha is not None
        stretched = {"rope_type": "default", "rope_theta": self.theta * alpha ** (dim / (dim - 2))}
        plain = Rope(parameters=stretched, head_dim=dim, max_position_embeddings=self.max_position_embeddings)
        return plain._computed(None)


def alpha_rope(own: tuple[str, ...] = ()) -> Derive:
    """Like ``rope``, also for the argument ``own``, for a family whose dynamic rope may have an alpha."""
    plain, known = rope(own=own), (*_KEYS, *_UNREAD, *own)

    def forward(hf: Hf) -> dict[str, object]:
        parameters = merged(hf)
        if parameters["rope_type"] != "dynamic" or not parameters.get("alpha"):
            return plain.forward(hf)
        if wrong := {name: value for name, value in parameters.items() if name not in known or isinstance(value, bool)}:
            raise ConfigError(f"A rope with alpha may have the keys {sorted(known)}, found {wrong}. Delete these.")
        if wrong := {name: shown(parameters.get(name)) for name in _NUMBERS if not is_number(parameters.get(name))}:
            raise ConfigError(f"A rope with alpha must have finite numbers, found {wrong}. Correct the HF config.")
        length = count(hf, "max_position_embeddings")
        hf_rope = AlphaRope(parameters=parameters, head_dim=head_dim(hf), max_position_embeddings=length)
        return {"hf_rope": hf_rope, "rotary_base": hf_rope.theta, "rotary_percent": 1.0}

    return Derive(plain.names, forward, plain.backward, plain.refuses)


ALPHA_ROPE = alpha_rope()
