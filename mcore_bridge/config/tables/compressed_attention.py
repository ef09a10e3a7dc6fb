"""The config table, with its entries, of attention to compressed keys, and of routers that take experts from a table.

Some layers have windows alone. Others also read compressed keys: all of them, or keys that an indexer selects.
"""

from mcore_bridge.config.fields import Const, Derive, Field, Hf, Ignore, Map, Mcore, Preset, Require, count
from mcore_bridge.config.layer_kinds import sizes_by_layer, values_of_layers
from mcore_bridge.config.rope import Rope, rope_from
from mcore_bridge.config.tables import DECODER, INTERLEAVED, OWN_HEAD, QK_PLAIN, WINDOW_ALL, but, published, without
from mcore_bridge.config.tables.by_layer import ONE_LIMIT
from mcore_bridge.config.tables.moe import MTP_ON_REQUEST, ROUTED, SCALED, SOFTMAX_NORMALISED
from mcore_bridge.config.tables.scales import MIXED
from mcore_bridge.errors import ConfigError, shown

_KINDS = {
    "sliding_attention": None,
    "compressed_sparse_attention": "selected",
    "heavily_compressed_attention": "all",
}
_BY_TOKEN = {"hash_moe": True, "moe": False}
_NAMES = {kind: name for name, kind in _KINDS.items()}
_OWN = "per_layer_config"


def _of_layers(hf: Hf, field: str, known: dict[str, object]) -> list[object]:
    kinds, num_layers = hf.get(field), count(hf, "num_hidden_layers")
    if not isinstance(kinds, list) or len(kinds) != num_layers or set(kinds) - known.keys():
        raise ConfigError(
            f"{field} must name one of {sorted(known)} for each of the {num_layers} layers, found {shown(kinds)}."
        )
    return [known[kind] for kind in kinds]


def _layers(hf: Hf) -> dict[str, object]:
    rates, kinds = hf.get("compress_rates"), _of_layers(hf, "layer_types", {**_KINDS})
    by_token = _of_layers(hf, "mlp_layer_types", {**_BY_TOKEN})
    if not isinstance(rates, dict) or rates.keys() != {name for name in _KINDS if _KINDS[name]}:
        raise ConfigError(f"compress_rates must have a number for each kind that compresses, found {shown(rates)}.")
    if by_token != sorted(by_token, reverse=True):  # type: ignore[type-var]
        raise ConfigError(
            f"mlp_layer_types must have all 'hash_moe' first, found {shown(hf['mlp_layer_types'])}: tokens are known "
            "in the first stage of a pipeline alone."
        )
    model = {"compression": None, "experts_by_token": False}
    layers = [{"compression": kind, "experts_by_token": own} for kind, own in zip(kinds, by_token, strict=True)]
    ratios = {str(_KINDS[name]): count(rates, name) for name in rates}
    return {**model, "compression_ratios": ratios, _OWN: sizes_by_layer(layers, model)}


def _layers_back(mcore: Mcore) -> dict[str, object]:
    num_layers, ratios = count(mcore, "num_layers"), mcore["compression_ratios"]
    assert isinstance(ratios, dict)
    kinds, by_token = (values_of_layers(mcore, name, num_layers) for name in ("compression", "experts_by_token"))
    return {
        "layer_types": [_NAMES[kind] for kind in kinds],  # type: ignore[index]
        "mlp_layer_types": ["hash_moe" if own else "moe" for own in by_token],
        "compress_rates": {_NAMES[kind]: ratio for kind, ratio in ratios.items()},
    }


_ROPES = {"main": "hf_sliding_rope", "compress": "hf_rope"}
_THETAS = {"main": "rope_theta", "compress": "compress_rope_theta"}
_PARTIAL = "partial_rotary_factor"


def _ropes(hf: Hf) -> dict[str, object]:
    nested = hf.get("rope_parameters")
    if not isinstance(nested, dict) or nested.keys() != _ROPES.keys():
        raise ConfigError(f"rope_parameters must have the ropes {sorted(_ROPES)}, found {shown(nested)}.")
    plain = {**hf, "rope_scaling": None, "rope_theta": None, "qk_rope_head_dim": None}
    ropes = {name: rope_from({**plain, "rope_parameters": nested[kind]}) for kind, name in _ROPES.items()}
    if len({(rope.rotary_dim, rope.partial_rotary_factor) for rope in ropes.values()}) > 1:
        raise ConfigError(f"Both ropes must rotate equally many dims, found {shown(nested)}.")
    if wrong := {rope.rope_type for rope in ropes.values()} - {"default", "yarn"}:
        raise ConfigError(f"Ropes must be of type 'default' or 'yarn' in this family, found {sorted(wrong)}.")
    given = {field: (hf.get(field), ropes[_ROPES[kind]].theta) for kind, field in _THETAS.items()}
    if wrong_bases := {field: pair for field, pair in given.items() if pair[0] not in (None, pair[1])}:
        raise ConfigError(
            f"rope_parameters must have the same bases as the fields at the top, found other ones, as (top, "
            f"rope_parameters): {wrong_bases}. transformers reads rope_parameters alone: correct one of them."
        )
    first = ropes["hf_rope"]
    return {**ropes, "rotary_base": first.theta, "rotary_percent": first.partial_rotary_factor}


def _ropes_back(mcore: Mcore) -> dict[str, object]:
    ropes = {kind: mcore[name] for kind, name in _ROPES.items()}
    parameters: dict[str, dict[str, object]] = {}
    thetas: dict[str, object] = {}
    partial: float | None = None
    for kind, rope in ropes.items():
        assert isinstance(rope, Rope)
        partial = rope.partial_rotary_factor
        parameters[kind] = {**rope.parameters, _PARTIAL: partial}
        thetas[_THETAS[kind]] = rope.theta
    return {"rope_parameters": parameters, **thetas, _PARTIAL: partial}


def _heads(hf: Hf) -> dict[str, object]:
    heads, groups, dim = count(hf, "num_attention_heads"), count(hf, "o_groups"), count(hf, "head_dim")
    if hf.get("num_key_value_heads", 1) != 1:
        raise ConfigError(
            f"num_key_value_heads must be 1, found {shown(hf['num_key_value_heads'])}: all heads share their keys."
        )
    if heads % groups:
        raise ConfigError(f"o_groups={groups} must divide num_attention_heads={heads}. Correct one of them.")
    return {"num_attention_heads": heads, "num_query_groups": 1, "kv_channels": dim, "output_groups": groups}


def _heads_back(mcore: Mcore) -> dict[str, object]:
    sizes = {"num_attention_heads": "num_attention_heads", "head_dim": "kv_channels", "o_groups": "output_groups"}
    return {**{hf: mcore[name] for hf, name in sizes.items()}, "num_key_value_heads": mcore["num_query_groups"]}


def _experts(hf: Hf) -> dict[str, object]:
    names = ("moe_ffn_hidden_size", "ffn_hidden_size", "moe_shared_expert_intermediate_size")
    return dict.fromkeys(names, count(hf, "moe_intermediate_size"))


def _experts_back(mcore: Mcore) -> dict[str, object]:
    if len({mcore[name] for name in _experts({"moe_intermediate_size": 1})}) > 1:
        raise ConfigError("Routed and shared experts must have one size, as in the HF config. Remove overrides.")
    return {"moe_intermediate_size": mcore["moe_ffn_hidden_size"]}


_ONE_SIZE = "shared experts have the size of one routed expert, whatever their number"
COMPRESSED: tuple[Field, ...] = (
    *but(
        without(DECODER, "ffn_hidden_size", "share_embeddings_and_output_weights"),
        Derive(("rope_parameters", "rope_scaling", *_THETAS.values(), _PARTIAL), _ropes, _ropes_back),
        Derive(("num_attention_heads", "num_key_value_heads", "head_dim", "o_groups"), _heads, _heads_back),
        *(*INTERLEAVED, *QK_PLAIN, *WINDOW_ALL, Const("multi_latent_attention", False)),
        *(Const("add_bias_linear", False), Const("add_qkv_bias", False), Const("softmax_type", "learnable")),
    ),
    Derive(("layer_types", "compress_rates", "mlp_layer_types"), _layers, _layers_back),
    *(Map("q_lora_rank", "query_rank"), Map("o_lora_rank", "output_rank")),
    *(Map("index_n_heads", "dsa_indexer_n_heads"), Map("index_head_dim", "dsa_indexer_head_dim")),
    Map("index_topk", "dsa_indexer_topk"),
    Ignore("it follows from partial_rotary_factor", ("qk_rope_head_dim",)),
    Ignore("it describes encoded weights, which files show", ("expert_dtype",)),
    *published(attention_bias=False, mlp_bias=False, topk_method="noaux_tc"),
    *but(ROUTED, Map("n_routed_experts", "num_moe_experts")),
    *but(SOFTMAX_NORMALISED, Const("moe_router_enable_expert_bias", True)),
    *(Const("root_scores", True), Const("router_norm_min", 1e-20), Const("moe_layer_freq", 1)),
    *(Preset("moe_router_bias_update_rate", 0.0), Preset("moe_router_dtype", "fp32")),
    *(SCALED, MTP_ON_REQUEST, Const("mtp_kinds", "*E")),  # MTP layers compress no keys, and have scored experts
    Derive(("moe_intermediate_size", "intermediate_size"), _experts, _experts_back),
    Const("moe_shared_expert_gate", False),
    Require("n_shared_experts", (1,), _ONE_SIZE),
    Require("scoring_func", ("sqrtsoftplus",), "nobody has written other scores in this family"),
    Require("norm_topk_prob", (True, None), "transformers always normalises the weights of experts"),
    *OWN_HEAD,
    *(ONE_LIMIT, *MIXED),
    Const("limits_before_activation", True),
)
"""Attention to windows and compressed keys beside residual streams, and experts by tables or by roots of softplus."""
