"""Entries of config tables about positions: the ropes that a family supports, and its layers without rope."""

from mcore_bridge.config.fields import Derive, Hf, Mcore, count, per_layer
from mcore_bridge.config.rope import Rope, rope_from
from mcore_bridge.config.rope_spelling import MULTIMODAL, ORIGINAL_LENGTH, ROPE_TYPES, spelled
from mcore_bridge.errors import ConfigError

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
    """Also with the names of transformers 4, whose GPT-NeoX derives the other fields from these two at every read."""
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


def layers_without_rope(mcore: Mcore) -> list[int]:
    """1 for each layer without rope. ``no_rope_freq`` holds a list of these, or n if every n-th layer has none."""
    return per_layer(mcore, "no_rope_freq", unset=False, rule=lambda layer, n: (layer + 1) % n == 0)


def _rotary_dim(hf: Hf) -> dict[str, object]:
    given, expected = hf.get("rotary_dim"), rope_from(hf).rotary_dim
    if given not in (None, expected):
        raise ConfigError(
            f"rotary_dim must be {expected}, which follows from partial_rotary_factor, found {given!r}: published code "
            "reads only the factor. Set partial_rotary_factor to the value of training, and delete rotary_dim."
        )
    return {}


ROPE = rope()
_PARTIAL = rope(own=("partial_rotary_factor",))
ROTARY_ROPE = Derive(
    (*_PARTIAL.names, "rotary_pct", "rotary_emb_base"), _PARTIAL.forward, _rotary_back, _PARTIAL.refuses
)
MULTIMODAL_ROPE = rope(own=MULTIMODAL)
"""The rope of the text of a composite: without images, its three positions are equal."""
_TWO_DIMS = "`rotary_dim` other than the value from `partial_rotary_factor`: published code reads only the factor"
ROTARY_DIM = Derive(("rotary_dim",), _rotary_dim, lambda mcore: {}, (_TWO_DIMS,))
NO_ROPE = Derive(("no_rope_layers",), _no_rope, _no_rope_back)
