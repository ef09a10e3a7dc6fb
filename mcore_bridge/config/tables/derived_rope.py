"""Entries of config tables about positions: which rope a family computes, and which of its layers have none."""

from mcore_bridge.config.fields import Derive, Hf, Mcore, count, per_layer
from mcore_bridge.config.rope import Rope, rope_from
from mcore_bridge.config.rope_spelling import MULTIMODAL, ORIGINAL_LENGTH, ROPE_TYPES, spelled
from mcore_bridge.errors import ConfigError

_OF_YARN = ("llama_4_scaling_beta", "max_position_embeddings")
_OWN = ("partial_rotary_factor", *_OF_YARN, *MULTIMODAL)
"""Rope parameters that change something in some families only; elsewhere transformers drops them, or fails."""


def rope(types: tuple[str, ...] = ROPE_TYPES, own: tuple[str, ...] = ()) -> Derive:
    """The entry of a family whose modelling code computes these rope types, and these of ``_OWN``."""
    names = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
    at_the_top = (ORIGINAL_LENGTH,) if "longrope" in types else ()

    def forward(hf: Hf) -> dict[str, object]:
        found = rope_from(hf)
        if found.rope_type not in types:
            raise ConfigError(
                f"The rope type must be one of {sorted(types)} in this family, found {found.rope_type!r}."
            )
        if unknown := {name: found.parameters[name] for name in _OWN if name in found.parameters and name not in own}:
            raise ConfigError(
                f"The rope must not have {unknown}, which the modelling code of this family does not reproduce. Delete "
                "what you do not need."
            )
        return {"hf_rope": found, "rotary_base": found.theta, "rotary_percent": found.partial_rotary_factor}

    def backward(mcore: Mcore) -> dict[str, object]:
        found = mcore["hf_rope"]
        assert isinstance(found, Rope)
        partial = {"partial_rotary_factor": found.partial_rotary_factor} if "partial_rotary_factor" in own else {}
        return spelled({**found.parameters, **partial})  # also where it is 1, which is not everybody's default

    known = ", ".join(f"`{name}`" for name in types)
    possible = (name for name in _OWN if "yarn" in types or name not in _OF_YARN)
    unread = ", ".join(f"`{name}`" for name in possible if name not in own)
    refuses = (
        f"rope types but {known}: transformers computes no other in this family, or we do not reproduce it",
        f"{unread} of a rope: the modelling code does not reproduce it",
    )
    return Derive((*names, *at_the_top), forward, backward, refuses[: 2 if unread else 1])


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
    """1 for each layer that is not rotated, by ``no_rope_freq``: a list of these, or n if each n-th is not."""
    return per_layer(mcore, "no_rope_freq", unset=False, rule=lambda layer, n: (layer + 1) % n == 0)


def _rotary_dim(hf: Hf) -> dict[str, object]:
    given, found = hf.get("rotary_dim"), rope_from(hf).rotary_dim
    if given not in (None, found):
        raise ConfigError(
            f"rotary_dim must be the {found} dims that partial_rotary_factor says, found {given!r}: of these two, "
            "published code reads only the factor. Set partial_rotary_factor to what the model was trained with."
        )
    return {}


ROPE = rope()
MULTIMODAL_ROPE = rope(own=MULTIMODAL)
"""That of a text which has images beside it elsewhere: its three positions are one."""
_TWO_DIMS = "`rotary_dim` but what `partial_rotary_factor` says: published code reads only the factor"
ROTARY_DIM = Derive(("rotary_dim",), _rotary_dim, lambda mcore: {}, (_TWO_DIMS,))
NO_ROPE = Derive(("no_rope_layers",), _no_rope, _no_rope_back)
