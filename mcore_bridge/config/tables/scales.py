"""Entries of config tables for scales of embeddings and queries, for caps of scores and logits, and for streams.

Residuals of several streams (hyper-connections) have the field names of megatron-core 0.20.
"""

from math import nextafter

from mcore_bridge.config.fields import Const, Derive, Field, Hf, Map, Mcore, count, is_number
from mcore_bridge.config.rope import head_dim
from mcore_bridge.errors import ConfigError, shown


def softcap(hf_name: str, mcore_name: str) -> Derive:
    """The entry of a soft cap, which may be None."""

    def forward(hf: Hf) -> dict[str, object]:
        cap = hf.get(hf_name)
        if cap is not None and (isinstance(cap, bool) or not isinstance(cap, int | float) or cap <= 0):
            raise ConfigError(f"{hf_name} must be None or a positive number, found {cap!r}.")
        return {mcore_name: cap}

    return Derive((hf_name,), forward, lambda mcore: {hf_name: mcore[mcore_name]})


def _embedding(hf: Hf) -> dict[str, object]:
    return {"embedding_scale": count(hf, "hidden_size") ** 0.5}


def _embedding_back(mcore: Mcore) -> dict[str, object]:
    expected = _embedding(mcore)["embedding_scale"]
    if mcore["embedding_scale"] != expected:
        raise ConfigError(
            f"embedding_scale must be {expected}, the root of hidden_size, to be written as an HF config of this "
            f"architecture, found {mcore['embedding_scale']!r}. Remove the override."
        )
    return {}


def _if_mup(hf: Hf) -> dict[str, object]:
    return _embedding(hf) if hf.get("mup_enabled") else {"embedding_scale": None}


def _if_mup_back(mcore: Mcore) -> dict[str, object]:
    if mcore["embedding_scale"] is None:
        return {"mup_enabled": False}
    return {"mup_enabled": True, **_embedding_back(mcore)}


def _query(hf: Hf) -> dict[str, object]:
    scalar = hf.get("query_pre_attn_scalar")
    if isinstance(scalar, bool) or not isinstance(scalar, int | float) or scalar <= 0:
        raise ConfigError(f"query_pre_attn_scalar must be a positive number, found {scalar!r}.")
    return {"softmax_scale": scalar**-0.5}


def _query_back(mcore: Mcore) -> dict[str, object]:
    scale = mcore["softmax_scale"]
    if not isinstance(scale, int | float):
        raise ConfigError(f"softmax_scale must be a number, found {scale!r}. Remove the override.")
    near = scale**-2
    candidates = (round(near), near, nextafter(near, 0.0), nextafter(near, 2 * near))
    return {"query_pre_attn_scalar": next((scalar for scalar in candidates if scalar and scalar**-0.5 == scale), near)}


def scaled_scores(field: str) -> Derive:
    """The entry of a multiplier of queries or of keys. Scores are multiplied once, since rope is linear in both."""

    def forward(hf: Hf) -> dict[str, object]:
        multiplier = hf.get(field)
        if not is_number(multiplier):
            raise ConfigError(f"{field} must be a finite number, found {shown(multiplier)}. Correct the HF config.")
        return {"softmax_scale": multiplier * head_dim(hf) ** -0.5}

    def backward(mcore: Mcore) -> dict[str, object]:
        scale, dim = mcore["softmax_scale"], count(mcore, "kv_channels")
        if not is_number(scale):
            raise ConfigError(f"softmax_scale must be a number, found {shown(scale)}. Remove the override.")
        near = scale * dim**0.5
        candidates = (near, nextafter(near, 0.0), nextafter(near, 2 * near))
        return {field: next((number for number in candidates if number * dim**-0.5 == scale), near)}

    return Derive((field,), forward, backward)


# fmt: off
EMBEDDING         = Derive((), _embedding, _embedding_back)
EMBEDDING_IF_MUP  = Derive(("mup_enabled",), _if_mup, _if_mup_back)
QUERY             = Derive(("query_pre_attn_scalar",), _query, _query_back)
ATTENTION_SOFTCAP = softcap("attn_logit_softcapping", "attention_softcap")
LOGIT_SOFTCAP     = softcap("final_logit_softcapping", "logit_softcap")
# fmt: on
MULTIPLIERS: tuple[Field, ...] = (
    Map("embedding_multiplier", "embedding_scale"),
    Map("residual_multiplier", "residual_multiplier"),
    Map("attention_multiplier", "softmax_scale"),
    Map("logits_scaling", "logit_divisor"),
)
"""Granite's multipliers of embeddings, residuals and attention scores, and its divisor of logits."""
_SEVERAL: tuple[Field, ...] = (
    Const("enable_mhc_connections", True),
    Const("variable_seq_lengths", True),  # otherwise stages expect hidden states of the width of one stream
)
STREAMS: tuple[Field, ...] = (
    *_SEVERAL,
    Map("hc_mult", "mhc_num_residual_streams"),
    Map("hc_eps", "mhc_epsilon"),
)
MIXED: tuple[Field, ...] = (
    *STREAMS,
    Map("hc_sinkhorn_iters", "mhc_sinkhorn_iterations"),
    Const("mhc_magnitude", 2.0),
)
"""Streams that a matrix for each token mixes, whose rows and columns have nearly equal sums."""
UNMIXED: tuple[Field, ...] = (
    *STREAMS,
    Const("mhc_sinkhorn_iterations", 0),
    Map("hc_magnitude", "mhc_magnitude"),
)
"""Streams that are not mixed with each other."""
LOW_RANK_STREAMS: tuple[Field, ...] = (
    *_SEVERAL,
    Map("hc_count", "mhc_num_residual_streams"),
    Map("hc_lowrank", "mhc_rank"),
    Const("mhc_magnitude", 2.0),
)
"""Streams that are not mixed. Each has a norm, and a projection of low rank makes a gate for each of its elements."""
