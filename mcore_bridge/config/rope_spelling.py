"""Reads and writes rope settings with the field names of the installed transformers, 4.57 or 5.

Release 4.57 has ``rope_theta`` and ``rope_scaling``; release 5 has one ``rope_parameters``. A rope type or key that is
not listed here raises: if a key were dropped, the model would be right for short sequences only.
"""

import functools
import math
from collections.abc import Mapping

from mcore_bridge.config.fields import Hf, is_number
from mcore_bridge.errors import ConfigError, shown

DEFAULT_THETA = 10000.0
ORIGINAL_LENGTH = "original_max_position_embeddings"
FULL, SLIDING = "full_attention", "sliding_attention"
OF_ENGINES = "attn_factor"
"""A key of yarn that some engines read in the place of ``attention_factor``, as the factor of the usual one."""
_ENGINES_ALONE = {"dynamic": "alpha", "yarn": "extrapolation_factor"}
"""Keys that change what vLLM and SGLang compute for a rope type, and that transformers ignores: they are refused."""
_NO_OTHER = {"rope_scaling": None, "rope_theta": None}
_SCALED = ("factor",)
_REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "proportional": (),
    "linear": _SCALED,
    "dynamic": _SCALED,
    "llama3": (*_SCALED, "low_freq_factor", "high_freq_factor", ORIGINAL_LENGTH),
    "yarn": (*_SCALED, ORIGINAL_LENGTH),
    "longrope": ("short_factor", "long_factor", ORIGINAL_LENGTH),
}
_OPTIONAL: dict[str, tuple[str, ...]] = {
    "yarn": (
        *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
        *("llama_4_scaling_beta", "max_position_embeddings", OF_ENGINES),
    ),
    "longrope": ("attention_factor", "factor"),
    "proportional": _SCALED,
}
MULTIMODAL = ("mrope_section", "mrope_interleaved", "interleaved")
"""They assign dims to the three positions of an image token. A text token has one position, so they do not matter."""
_NEUTRAL = (("partial_rotary_factor", None), ("partial_rotary_factor", 1), ("finetuned", True))
_PER_DIM = ("short_factor", "long_factor")
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
"""The rope types of a family that does not list its own."""
_REFUSED = {
    "mrope": "it rotates by several position ids, which only multimodal models have",
}


def read_parameters(hf: Hf) -> dict[str, object]:
    """The rope parameters of a config, with the names of transformers 5. We reproduce them exactly, or raise.

    Raises:
        ConfigError: ``rope_parameters`` and ``rope_scaling`` differ, or have a type or key that we do not reproduce.
    """
    return checked(merged(hf))


def merged(hf: Hf) -> dict[str, object]:
    """The rope parameters of a config, with the names of transformers 5, without checking type and keys."""
    given = {name: hf[name] for name in ("rope_parameters", "rope_scaling") if hf.get(name) is not None}
    for name, value in given.items():
        if not isinstance(value, dict):
            raise ConfigError(f"{name} must be a mapping of rope parameters or None, found {value!r}.")
    spellings = [dict(value) for value in given.values() if isinstance(value, dict)]
    completed = [_completed(parameters, hf) for parameters in spellings if parameters] or [_completed({}, hf)]
    if completed[0] != completed[-1]:
        raise ConfigError(f"rope_parameters and rope_scaling must agree, found {spellings}. Delete one of them.")
    return completed[0]


def is_by_kind(parameters: object) -> bool:
    """Whether ``rope_parameters`` has a rope for each kind of layers, as transformers 5 alone writes it."""
    return isinstance(parameters, dict) and any(isinstance(value, dict) for value in parameters.values())


def of_layers(hf: Hf) -> dict[str, Hf]:
    """The config for each kind of layer (``FULL`` and ``SLIDING``), if ``rope_parameters`` has a rope for each.

    transformers drops the rope of a kind that no layer has.
    """
    nested = hf.get("rope_parameters")
    if not isinstance(nested, dict) or not is_by_kind(nested):
        return {}
    kinds = hf.get("layer_types")
    others = {FULL, SLIDING} - nested.keys() - {*(kinds if isinstance(kinds, list) else (FULL, SLIDING))}
    if others and len(nested) == 1:
        nested = {**nested, **dict.fromkeys(others, *nested.values())}
    if nested.keys() != {FULL, SLIDING} or not all(isinstance(value, dict) and value for value in nested.values()):
        raise ConfigError(f"rope_parameters by layer must be those of {FULL!r} and {SLIDING!r}, found {nested!r}.")
    return {kind: {**hf, "rope_parameters": nested[kind], **_NO_OTHER} for kind in nested}


def respelled(hf: Hf) -> dict[str, object]:
    """The rope fields of a config, for one kind of layer or two, with the names of the installed transformers."""
    if layers := of_layers(hf):
        return spelled_by_layer(merged(layers[FULL]), merged(layers[SLIDING]))
    return spelled(merged(hf))


def _completed(parameters: dict[str, object], hf: Hf) -> dict[str, object]:
    """``parameters`` with values from the top level of the config, and with defaults of transformers."""
    legacy = parameters.pop("type", None)
    parameters.setdefault("rope_type", legacy or "default")
    theta = hf.get("rope_theta", DEFAULT_THETA)  # null is no number, whatever the default is
    parameters.setdefault("rope_theta", theta)
    if theta not in (None, DEFAULT_THETA, parameters["rope_theta"]):  # every config of 4.57 has the default
        raise ConfigError(
            f"rope_theta must be one value, found {theta!r} at the top and {parameters['rope_theta']!r} in "
            "rope_parameters. Delete one of them."
        )
    if parameters["rope_type"] == "longrope" and hf.get(ORIGINAL_LENGTH) is not None:  # the top level has precedence
        parameters[ORIGINAL_LENGTH] = hf[ORIGINAL_LENGTH]
    if parameters["rope_type"] in ("llama3", "yarn", "longrope"):
        parameters.setdefault(ORIGINAL_LENGTH, hf["max_position_embeddings"])
    partial = hf.get("partial_rotary_factor")
    if partial is not None and parameters.setdefault("partial_rotary_factor", partial) != partial:
        raise ConfigError(
            f"partial_rotary_factor must be one value, found {partial!r} at the top and "
            f"{parameters['partial_rotary_factor']!r} in rope_parameters. Delete one of them."
        )
    return parameters


def unknown_keys(parameters: Mapping[str, object]) -> frozenset[str]:
    """The keys of rope parameters that are not listed here for their type, and that no engine is known to read."""
    rope_type = str(parameters.get("rope_type", parameters.get("type")) or "default")
    if rope_type not in _REQUIRED:
        return frozenset()
    return frozenset(parameters) - _known(rope_type) - {"type", _ENGINES_ALONE.get(rope_type)}


def _known(rope_type: str) -> frozenset[str]:
    always = ("rope_type", "rope_theta", "partial_rotary_factor", *MULTIMODAL)
    return frozenset((*always, *_REQUIRED[rope_type], *_OPTIONAL.get(rope_type, ())))


def checked(parameters: Mapping[str, object]) -> dict[str, object]:
    """Check that we reproduce type, keys and numbers exactly. Return the parameters without neutral ones.

    Raises:
        ConfigError: we do not.
    """
    rope_type = parameters["rope_type"]
    parameters = {name: parameters[name] for name in sorted(parameters) if (name, parameters[name]) not in _NEUTRAL}
    if not isinstance(rope_type, str) or rope_type not in _REQUIRED:
        reason = _REFUSED.get(str(rope_type), "it is not among the types that are tested against transformers")
        raise ConfigError(f"The rope type must be one of {sorted(_REQUIRED)}, found {rope_type!r}: {reason}.")
    required = ("rope_theta", *_REQUIRED[str(rope_type)])
    for name in required:
        if not _is_valid(name, value := parameters.get(name)):
            what = "numbers" if name in _PER_DIM else "a number"
            raise ConfigError(
                f"A rope of type {rope_type!r} must have {what} as {name!r}, found {shown(value)}. Set it."
            )
    theta, least = parameters["rope_theta"], int(rope_type == "yarn")  # yarn's correction divides by its logarithm
    if not is_number(theta) or theta <= least:
        raise ConfigError(
            f"rope_theta of a rope of type {rope_type!r} must be above {least}, found {shown(theta)}. Correct the HF "
            "config."
        )
    known = _known(rope_type)
    partial = parameters.get("partial_rotary_factor")
    if partial is not None and not is_number(partial):
        raise ConfigError(
            f"partial_rotary_factor must be a finite number, found {shown(partial)}. Correct the HF config."
        )
    if unknown := {name: parameters[name] for name in sorted(parameters) if name not in known}:
        raise ConfigError(
            f"A rope of type {rope_type!r} may have the keys {sorted(known)}, found also {unknown}, which may change "
            "what is computed. Delete them if the model was trained without them."
        )
    if rope_type == "yarn" and parameters.get(OF_ENGINES) is not None:
        _require_engines_agree(parameters)
    return parameters


def _require_engines_agree(yarn: Mapping[str, object]) -> None:
    """Raise unless every reader of a yarn rope multiplies cosines and sines by the same factor."""
    factor, of_engines, own = yarn["factor"], yarn[OF_ENGINES], yarn.get("attention_factor")
    if not is_number(of_engines) or not is_number(factor):
        raise ConfigError(f"{OF_ENGINES} must be a finite number, found {shown(of_engines)}. Correct the HF config.")
    usual = 0.1 * math.log(max(factor, 1)) + 1
    product = usual * of_engines
    if not is_number(own) or not math.isclose(own, product, rel_tol=1e-6):
        computed = usual if own is None else own
        raise ConfigError(
            f"{OF_ENGINES}={of_engines!r} must be beside attention_factor={round(product, 6)} in a yarn rope, found "
            f"{shown(own)}: transformers and vLLM 0.33 read attention_factor alone, and multiply cosines and sines by "
            f"{shown(computed)}. SGLang 0.5.23 and vLLM 0.26 read {OF_ENGINES} alone, and multiply by "
            f"{round(product, 6)}. If the model was trained so, set attention_factor to this value, and keep "
            f"{OF_ENGINES}. Otherwise delete {OF_ENGINES}."
        )


def _is_valid(name: str, value: object) -> bool:
    numbers = value if name in _PER_DIM and isinstance(value, list) else [value]
    return all(map(is_number, numbers))


def spelled_by_layer(full: Mapping[str, object], sliding: Mapping[str, object]) -> dict[str, object]:
    """The HF fields for the ropes of both kinds of layers, with the names of the installed transformers."""
    if speaks_rope_parameters():
        return {"rope_parameters": {FULL: dict(full), SLIDING: dict(sliding)}}
    if sliding.keys() != {"rope_type", "rope_theta"} or sliding["rope_type"] != "default":
        raise ConfigError(
            f"With transformers 4, sliding layers must have a rope without scaling, found {dict(sliding)!r}. Install "
            "transformers 5."
        )
    return {**spelled(full), "rope_local_base_freq": sliding["rope_theta"]}


def spelled(parameters: Mapping[str, object]) -> dict[str, object]:
    """The HF fields for rope ``parameters``, with the names of the installed transformers."""
    long = parameters["rope_type"] == "longrope"
    lengths = {ORIGINAL_LENGTH: parameters[ORIGINAL_LENGTH]} if long else {}  # transformers reads only the top level
    if speaks_rope_parameters():
        return {"rope_parameters": dict(parameters), **lengths}
    top = {name: parameters[name] for name in ("rope_theta", "partial_rotary_factor") if name in parameters}
    scaling = {name: value for name, value in parameters.items() if name not in {**top, **lengths}}
    if long:  # Phi3Config of 4.57 accepts only this name
        scaling["type"] = scaling.pop("rope_type")
    return {**top, **lengths, "rope_scaling": None if scaling == {"rope_type": "default"} else scaling}


@functools.cache
def speaks_rope_parameters() -> bool:
    """Whether the installed transformers has ``rope_parameters``, as release 5 does."""
    from transformers import LlamaConfig

    return "rope_parameters" in LlamaConfig().to_dict()
