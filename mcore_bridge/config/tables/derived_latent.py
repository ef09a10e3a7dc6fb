"""Entries of config tables for the head dims and ranks of multi-latent attention.

For models with multi-latent attention, transformers uses ``head_dim`` for the size of the rotated part of a head.
"""

from mcore_bridge.config.fields import Derive, Hf, Mcore, count
from mcore_bridge.config.tables.derived import called
from mcore_bridge.config.tables.derived_rope import ROPE, rope
from mcore_bridge.errors import ConfigError

_SIZES = {  # HF field: mcore name
    "num_attention_heads": "num_attention_heads",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
}


def _heads(hf: Hf) -> dict[str, object]:
    return _with_rotated(hf, count(hf, "qk_rope_head_dim"))


def _with_rotated(hf: Hf, rotated: int) -> dict[str, object]:
    heads = count(hf, "num_attention_heads")
    _require(hf, "num_key_value_heads", heads)
    _require(hf, "qk_head_dim", count(hf, "qk_nope_head_dim") + rotated)
    sizes = {mcore: count(hf, name) for name, mcore in _SIZES.items() if name != "qk_rope_head_dim"}
    rank = None if hf.get("q_lora_rank") is None else count(hf, "q_lora_rank")
    return {**sizes, "qk_pos_emb_head_dim": rotated, "num_query_groups": heads, "q_lora_rank": rank}


def _heads_back(mcore: Mcore) -> dict[str, object]:
    heads, groups = mcore["num_attention_heads"], mcore["num_query_groups"]
    if groups != heads:
        raise ConfigError(
            f"num_query_groups must be num_attention_heads={heads}, found {groups!r}. Remove the override."
        )
    sizes = {name: mcore[mcore_name] for name, mcore_name in _SIZES.items()}
    rotated = count(mcore, "qk_pos_emb_head_dim") if mcore["qk_pos_emb_head_dim"] else 0
    dims = count(mcore, "qk_head_dim") + rotated
    return {**sizes, "num_key_value_heads": heads, "qk_head_dim": dims, "q_lora_rank": mcore["q_lora_rank"]}


def _unrotated(hf: Hf) -> dict[str, object]:
    if hf.get("qk_rope_head_dim") != 0:
        raise ConfigError(f"qk_rope_head_dim must be 0, as no layer has a rope, found {hf.get('qk_rope_head_dim')!r}.")
    return _with_rotated(hf, 0)


def _rotated(hf: Hf) -> dict[str, object]:
    _require(hf, "head_dim", count(hf, "qk_rope_head_dim"))
    return {}


def _query(hf: Hf) -> dict[str, object]:
    _require(hf, "head_dim", count(hf, "qk_nope_head_dim") + count(hf, "qk_rope_head_dim"))
    return {}


def _query_back(mcore: Mcore) -> dict[str, object]:
    return {"head_dim": count(mcore, "qk_head_dim") + count(mcore, "qk_pos_emb_head_dim")}


def _require(hf: Hf, name: str, value: int) -> None:
    if hf.get(name) not in (None, value):
        raise ConfigError(
            f"{name} must be {value}, which follows from the other dims of multi-latent attention, found {hf[name]!r}. "
            "Delete the field."
        )


def _rope_of_part(hf: Hf) -> dict[str, object]:
    """The rope of a family with a ``partial_rotary_factor``, which must agree with ``qk_rope_head_dim``."""
    given = hf.get("rope_parameters")
    parameters = dict(given) if isinstance(given, dict) else {}
    rotated = count(hf, "qk_rope_head_dim")
    part = rotated / (rotated + count(hf, "qk_nope_head_dim"))
    if parameters.pop("partial_rotary_factor", part) != part:
        raise ConfigError(
            f"partial_rotary_factor must be {part}, as the dims of multi-latent attention say, found {given!r}. Delete "
            "it."
        )
    return _TEMPERED.forward({**hf, "rope_parameters": parameters})


def _rope_of_whole(hf: Hf) -> dict[str, object]:
    """A default rope rotates ``qk_rope_head_dim`` dims, whatever its ``partial_rotary_factor`` is."""
    given = hf.get("rope_parameters")
    parameters = dict(given) if isinstance(given, dict) else {}
    if parameters.get("rope_type", "default") == "default":
        parameters.pop("partial_rotary_factor", None)
        hf = {name: value for name, value in hf.items() if name != "partial_rotary_factor"}
    return _LONG.forward({**hf, "rope_parameters": parameters})


_REFUSED = ("`num_key_value_heads` other than `num_attention_heads`: every head has its own key",)
HEADS = Derive((*_SIZES, "q_lora_rank", "num_key_value_heads", "qk_head_dim"), _heads, _heads_back, _REFUSED)
UNROTATED_HEADS = Derive(HEADS.names, _unrotated, _heads_back, _REFUSED)
"""``HEADS`` without any rotated part."""
ONE_EPSILON = Derive(
    ("rms_norm_eps",),
    lambda hf: dict.fromkeys(("layernorm_epsilon", "latent_norm_epsilon"), hf["rms_norm_eps"]),
    lambda mcore: {"rms_norm_eps": mcore["layernorm_epsilon"]},
)
"""The norms of latents have the epsilon of other norms."""
_TEMPERED = rope(types=("yarn",), own=("llama_4_scaling_beta", "max_position_embeddings"))
_OTHER_PART = (
    "`partial_rotary_factor` of a rope other than the ratio of the dims of heads: the rope rotates qk_rope_head_dim"
)
ROPE_OF_PART = Derive(_TEMPERED.names, _rope_of_part, _TEMPERED.backward, (_TEMPERED.refuses[0], _OTHER_PART))
_LONG = called(ROPE, max_position_embeddings="model_max_length")
ROPE_OF_WHOLE = Derive(
    *(_LONG.names, _rope_of_whole, _LONG.backward),
    (
        *(_LONG.refuses[0], _LONG.refuses[1].removeprefix("`partial_rotary_factor`, ")),
        "a `partial_rotary_factor` with another rope type than default: transformers would rotate fewer dims",
    ),
)
HEAD_DIM = Derive(("head_dim",), _rotated, lambda mcore: {"head_dim": mcore["qk_pos_emb_head_dim"]})
QUERY_DIM = Derive(("head_dim",), _query, _query_back)
"""``HEAD_DIM`` of a family in which this field is the size of a whole query."""
