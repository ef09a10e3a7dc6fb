"""Llama 4, the text model: attention in chunks, layers without a rope, one routed expert whose input is scaled."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Const, Derive, Field, Hf, Ignore, Map, Mcore, Preset, Require, count
from mcore_bridge.config.layer_kinds import layers_of
from mcore_bridge.config.tables import BIAS_ATTENTION, DECODER, INTERLEAVED, WINDOW_NEVER, but
from mcore_bridge.config.tables.derived_rope import NO_ROPE, rope
from mcore_bridge.config.tables.moe import ROUTED, one_size
from mcore_bridge.errors import ConfigError
from mcore_bridge.models.blocks import GATED_MLP, GQA, NORMS, O_BIAS, QKV_BIAS, decoder
from mcore_bridge.rules.layout import REPLICATED
from mcore_bridge.rules.mapping import experts, table, under

# Tables of Llama 4: attention in chunks, queries in layers without rope, layers and scores of experts.
_KINDS = ("full_attention", "chunked_attention")
_UNWEIGHTED = "after_rope_unweighted"


def _chunks(hf: Hf) -> dict[str, object]:
    kinds, num_layers = hf.get("layer_types"), count(hf, "num_hidden_layers")
    if not isinstance(kinds, list) or len(kinds) != num_layers or set(kinds) - {*_KINDS}:
        raise ConfigError(f"layer_types must be one of {_KINDS} for each of the {num_layers} layers, found {kinds!r}.")
    return {"attention_chunks": [count(hf, "attention_chunk_size") * _KINDS.index(kind) for kind in kinds]}


def _chunks_back(mcore: Mcore) -> dict[str, object]:
    chunks = mcore["attention_chunks"]
    assert isinstance(chunks, list)
    kinds = [_KINDS[bool(chunk)] for chunk in chunks[: count(mcore, "num_layers")]]
    return {"layer_types": kinds, **({"attention_chunk_size": max(chunks)} if any(chunks) else {})}


def _moe_layers(hf: Hf) -> dict[str, object]:
    sparse = hf.get("moe_layers")
    if not isinstance(sparse, list):
        raise ConfigError(f"moe_layers must be a list of the layers that have experts, found {sparse!r}.")
    return {"moe_layer_freq": [int(layer in sparse) for layer in range(count(hf, "num_hidden_layers"))]}


def _moe_layers_back(mcore: Mcore) -> dict[str, object]:
    return {"moe_layers": [layer for layer, sparse in enumerate(layers_of(mcore)) if sparse]}


def _temperature(hf: Hf) -> dict[str, object]:
    tuned = hf.get("attn_temperature_tuning")
    return {"nope_temperature": (hf["attn_scale"], count(hf, "floor_scale")) if tuned else None}


def _temperature_back(mcore: Mcore) -> dict[str, object]:
    values = mcore["nope_temperature"]
    if values is None:
        return {"attn_temperature_tuning": False}
    assert isinstance(values, tuple)
    return {"attn_temperature_tuning": True, "attn_scale": values[0], "floor_scale": values[1]}


def _norms(hf: Hf) -> dict[str, object]:
    return {"qk_norm_kind": _UNWEIGHTED if hf.get("use_qk_norm") else "head", "qk_layernorm": False}


def _norms_back(mcore: Mcore) -> dict[str, object]:
    if mcore["qk_layernorm"]:
        raise ConfigError("qk_layernorm must be False, found True: these norms have no weights. Remove the override.")
    return {"use_qk_norm": mcore["qk_norm_kind"] == _UNWEIGHTED}


CHUNKED: tuple[Field, ...] = (
    Derive(
        ("layer_types", "attention_chunk_size"),
        _chunks,
        _chunks_back,
        (f"`layer_types` other than {' and '.join(f'`{kind}`' for kind in _KINDS)}: transformers computes no other",),
    ),
    NO_ROPE,
    Ignore("transformers has made no_rope_layers of it", ("no_rope_layer_interval",)),
    Derive(("attn_temperature_tuning", "attn_scale", "floor_scale"), _temperature, _temperature_back),
    Derive(("use_qk_norm",), _norms, _norms_back),
)
"""Layers that attend within chunks, and layers without a rope, whose queries have a temperature."""
ROPE = rope(types=("default", "llama3"))
ON_INPUT: tuple[Field, ...] = (
    *(entry for entry in ROUTED if "num_experts_per_tok" not in entry.names),
    Map("intermediate_size_mlp", "ffn_hidden_size"),
    one_size("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
    Derive(("moe_layers",), _moe_layers, _moe_layers_back),
    Ignore("transformers has made moe_layers of it", ("interleave_moe_layer_step",)),
    Require("num_experts_per_tok", (1,), "megatron-core multiplies the input of a single expert only"),
    Const("moe_router_topk", 1),
    Const("moe_apply_probs_on_input", True),
    Const("moe_router_score_function", "sigmoid"),
    Const("moe_router_enable_expert_bias", False),
    Const("moe_router_pre_softmax", False),
    Const("moe_shared_expert_gate", False),
    Preset("moe_router_dtype", "fp32"),
)
"""One routed expert for a token, whose input is multiplied by a sigmoid in fp32, and a shared expert of equal size."""

# fmt: off
MLP = (*under("mlp",                "feed_forward",               GATED_MLP),
       *under("mlp.shared_experts", "feed_forward.shared_expert", GATED_MLP),
       *experts("mlp.experts.*",    "feed_forward.experts.*",     GATED_MLP, turned=True),
       *table(("mlp.router.weight", "feed_forward.router.weight", REPLICATED)))
# fmt: on
ARCHITECTURE = Architecture(
    model_type="llama4_text",
    fields=(*but(DECODER, *INTERLEAVED, ROPE, *ON_INPUT), *BIAS_ATTENTION, *WINDOW_NEVER, *CHUNKED),
    expert_format="fused",
    swapped_in_peft=True,
    rules=lambda hf: decoder(NORMS, GQA, QKV_BIAS, O_BIAS, MLP),
)
