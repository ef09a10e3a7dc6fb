"""Checks that a mesh fits a model, before anything is built: megatron-core's divisions must leave no remainder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from mcore_bridge.config.layer_kinds import each_size, shares_selection, value_channels, values_of_layers
from mcore_bridge.errors import MeshError
from mcore_bridge.installed import Release, megatron_release

if TYPE_CHECKING:
    from mcore_bridge.config.mesh.parallel_dims import ParallelDims

DELTA_CONTEXT = Release("0.19", "earlier releases have no context parallelism of gated delta nets")
_HF_NAMES = {
    "num_layers": "num_hidden_layers",
    "num_query_groups": "num_key_value_heads",
    "ffn_hidden_size": "intermediate_size",
    "kv_channels": "head_dim",
    "mamba_num_groups": "n_groups or mamba_n_groups",
    "mamba_num_heads": "mamba_num_heads or mamba_n_heads",
    "mamba_state_dim": "ssm_state_size or mamba_d_state",
    "moe_ffn_hidden_size": "moe_intermediate_size",
    "output_groups": "o_groups",
    "num_moe_experts": "the number of routed experts",
    "moe_shared_expert_intermediate_size": "the size of the shared experts",
    "mtp_num_layers": "num_nextn_predict_layers",
}
_DIVIDED = (
    ("num_attention_heads", "tp"),
    ("vocab_size", "tp"),
    ("moe_shared_expert_intermediate_size", "tp"),
    ("moe_ffn_hidden_size", "etp"),
    ("num_moe_experts", "ep"),
)


def check_model(dims: ParallelDims, settings: Mapping[str, object]) -> None:
    """Check that megatron-core can cut a model along every axis of ``dims``.

    Args:
        dims: the mesh.
        settings: ``TransformerConfig`` fields and ``GPTModel`` arguments by name, with ``num_layers`` at least. Fields
            that are missing or None are not checked.

    Raises:
        MeshError: the mesh does not fit. The message has the field, its name in the HF config, its value, and what to
            change.
    """
    for sizes in each_size(settings):
        _check_sizes(dims, sizes)
    if dims.ep > 1 and settings.get("num_moe_experts") is None:
        raise MeshError(f"ep={dims.ep} needs a model with experts, but this one has none: use ep=1")
    if dims.pp > 1 and settings.get("layer_input_size") is not None:
        raise MeshError(
            f"pp={dims.pp} must be 1: each layer has an input from the embeddings of tokens, and may read keys of an "
            "earlier layer, and stages pass on neither (hidden_size_per_layer_input). Use tp, cp or dp"
        )
    if dims.etp > 1 and settings.get("num_moe_experts") and settings.get("add_bias_linear"):
        raise MeshError(f"etp={dims.etp} must be 1: megatron-core cannot cut experts that have biases; use ep instead")
    if settings.get("experimental_attention_variant") == "gated_delta_net":
        _check_linear_heads(dims, settings)
    kinds = settings.get("layer_kinds")
    letters = "".join(kinds) if isinstance(kinds, tuple) else ""
    if "M" in letters:
        _check_mamba(dims, settings)
    # short convolutions, each channel of which is on one rank
    if "C" in letters or settings.get("residual_convolutions"):
        _require_divided(dims, settings, "hidden_size", "tp")
    if settings.get("shared_experts_scored"):
        _require_divided(dims, settings, "moe_ffn_hidden_size", "tp")
    if "K" in letters:  # each head is on one rank, and narrow inputs of decay and gate are cut by their channels
        _require_divided(dims, settings, "linear_num_key_heads", "tp")
        if not settings.get("kda_full_rank"):
            _require_divided(dims, settings, "linear_key_head_dim", "tp")
    if settings.get("experimental_attention_variant") == "dsa" and dims.tp > 1 and not dims.sp:
        raise MeshError(f"tp={dims.tp} needs sp=True: megatron-core's sparse attention works only with it; set sp=True")
    if settings.get("compression_ratios") is not None:
        _require_divided(dims, settings, "output_groups", "tp")
    _check_split(dims, settings)
    _check_readers_of_tokens(dims, settings)
    _check_shared_selections(dims, settings)


def _check_sizes(dims: ParallelDims, sizes: Mapping[str, object]) -> None:
    """The checks of sizes that may differ between layers."""
    for name, axis in _DIVIDED:
        _require_divided(dims, sizes, name, axis)
    if not _is_all_moe(sizes):
        _require_divided(dims, sizes, "ffn_hidden_size", "tp")
    if not sizes.get("multi_latent_attention"):
        _check_groups(dims, sizes)


def _require_divided(dims: ParallelDims, settings: Mapping[str, object], name: str, axis: str) -> None:
    value, size = settings.get(name), getattr(dims, axis)
    if isinstance(value, int) and value % size:
        raise MeshError(f"{axis}={size} must divide {_say(name, value)}: choose another {axis}")


def _is_all_moe(settings: Mapping[str, object]) -> bool:
    """Whether every layer has experts, so that none has the dense MLP of ``ffn_hidden_size``."""
    frequency = settings.get("moe_layer_freq", 1)
    all_layers = all(frequency) if isinstance(frequency, list) else frequency == 1
    return settings.get("num_moe_experts") is not None and all_layers


def _check_groups(dims: ParallelDims, settings: Mapping[str, object]) -> None:
    heads, channels = settings.get("num_attention_heads"), settings.get("kv_channels")
    groups = settings.get("num_query_groups") or heads
    if not isinstance(heads, int) or not isinstance(groups, int):
        return
    if groups % dims.tp and dims.tp % groups:
        raise MeshError(
            f"tp={dims.tp} must divide {_say('num_query_groups', groups)} or be a multiple of it: megatron-core "
            "cannot share key and value heads otherwise; choose such a tp"
        )
    num_heads = heads * (2 if settings.get("attention_output_gate") else 1) + groups
    if isinstance(channels, int) and (rows := num_heads * channels + groups * value_channels(settings)) % dims.tp:
        raise MeshError(
            f"tp={dims.tp} must divide the {rows} rows of linear_qkv (num_attention_heads={heads}, "
            f"{_say('num_query_groups', groups)}, {_say('kv_channels', channels)}): choose a smaller tp"
        )


def _check_linear_heads(dims: ParallelDims, settings: Mapping[str, object]) -> None:
    """Unlike key and value heads, a head of linear attention is never cut: it has one state for the whole sequence."""
    heads = settings.get("linear_num_key_heads")  # their number divides the number of value heads
    if isinstance(heads, int) and heads % (dims.tp * dims.cp):
        raise MeshError(
            f"tp={dims.tp} times cp={dims.cp} must divide linear_num_key_heads={heads}: megatron-core distributes "
            "whole heads of linear attention over both; choose a smaller tp or cp"
        )
    if dims.cp > 1 and not DELTA_CONTEXT.is_installed:
        raise MeshError(
            f"cp={dims.cp} with linear attention needs megatron-core {DELTA_CONTEXT.version} or later, found "
            f"{megatron_release()}: {DELTA_CONTEXT.reason}. Use cp=1, or install it"
        )


def _check_mamba(dims: ParallelDims, settings: Mapping[str, object]) -> None:
    """A rank has whole groups of heads, or a part of one: some heads, and an equal part of the rows of B and C."""
    groups = settings.get("mamba_num_groups")
    if not isinstance(groups, int) or groups % dims.tp == 0:  # the number of heads is a multiple of it
        return
    if dims.tp % groups:
        raise MeshError(
            f"tp={dims.tp} must divide {_say('mamba_num_groups', groups)} or be a multiple of it: a rank has heads of "
            "several groups otherwise; choose such a tp"
        )
    _require_divided(dims, settings, "mamba_num_heads", "tp")
    state = settings.get("mamba_state_dim")
    if isinstance(state, int) and groups * state % dims.tp:
        raise MeshError(
            f"tp={dims.tp} must divide {groups} times {_say('mamba_state_dim', state)}: ranks of one group share its "
            "state; choose another tp"
        )


def _check_split(dims: ParallelDims, settings: Mapping[str, object]) -> None:
    num_layers = settings.get("num_layers")
    if not isinstance(num_layers, int):
        raise MeshError(f"num_layers (num_hidden_layers in the HF config) must be an integer, found {num_layers!r}")
    wanted = settings.get("mtp_num_layers") or 0
    with_embedding, *others = dims.stages(num_layers)
    if any(stage.num_mtp_layers for stage in others if stage.pp_rank == with_embedding.pp_rank):
        raise MeshError(
            f"layout {dims.layout!r} puts MTP layers ('m') on the rank of the embedding ('E'), but not in its stage: "
            "the rank would hold two copies of the embedding. Put them on another rank, or into that stage"
        )
    by_layer = isinstance(settings.get("window_attn_skip_freq") or settings.get("no_rope_freq"), list)
    sized = settings.get("per_layer_config") and settings.get("mtp_kinds") is None
    if wanted and ((by_layer and settings.get("mtp_like_layer") is None) or sized):
        raise MeshError(
            f"mtp_num_layers must be None, found {wanted}: it is not known which window, rope or sizes the MTP layers "
            "of this model have. Remove mtp_num_layers"
        )
    linear = settings.get("linear_attention_freq")
    if wanted and isinstance(linear, list) and linear[num_layers - 1]:
        raise MeshError(
            f"mtp_num_layers must be None, found {wanted}: megatron-core builds MTP layers like the last layer, which "
            "has linear attention here. Remove mtp_num_layers"
        )
    placed = sum(stage.num_mtp_layers for stage in dims.stages(num_layers))
    if dims.layout is not None and placed != wanted:
        raise MeshError(
            f"layout {dims.layout!r} must place {_say('mtp_num_layers', wanted)} MTP layers ('m'), found {placed}: "
            "add or remove 'm'"
        )


_READERS = {
    "experts_by_token": "whose experts tokens choose (mlp_layer_types in the HF config)",
    "ngram_layer": "of which the last has embeddings of n-grams (ple_layer_ids in the HF config)",
}


def _check_readers_of_tokens(dims: ParallelDims, settings: Mapping[str, object]) -> None:
    """One stage alone knows tokens, so it has all layers that read them. TP cuts embeddings of n-grams by rows."""
    num_layers, ngrams = settings["num_layers"], cast("Any", settings.get("ngrams"))
    assert isinstance(num_layers, int)
    first = dims.stages(num_layers)[0].layers
    for name, reason in _READERS.items():
        own = values_of_layers({name: None, **settings}, name, num_layers)
        last = max((layer for layer, value in enumerate(own, 1) if value is not None and value is not False), default=0)
        if last > len(first):
            raise MeshError(
                f"the first stage of the pipeline must have the first {last} layers, {reason}, found {len(first)}: "
                "stages do not pass tokens on. Choose another pp or vp, or give a layout"
            )
        if last and ngrams is not None:
            _require_divided(dims, settings, "hidden_size", "tp")
            if ngrams.divisor % dims.tp:
                raise MeshError(
                    f"tp={dims.tp} must divide make_ngram_vocab_size_divisible_by={ngrams.divisor}: the rows of "
                    "embeddings of n-grams are a multiple of it, and are cut over tp. Choose another tp"
                )


def _check_shared_selections(dims: ParallelDims, settings: Mapping[str, object]) -> None:
    """A selection of an indexer cannot be shared across stages, nor by more than one MTP layer."""
    freq, offset = settings.get("dsa_indexer_topk_freq", 1), settings.get("dsa_indexer_skip_topk_offset", 0)
    num_layers, num_mtp_layers = settings["num_layers"], settings.get("mtp_num_layers") or 0
    assert isinstance(freq, int)
    assert isinstance(offset, int)
    assert isinstance(num_layers, int)
    assert isinstance(num_mtp_layers, int)
    if freq > 1 and num_mtp_layers > 1:
        raise MeshError(
            f"mtp_num_layers must be 1, found {num_mtp_layers}: it is not known which selection further MTP layers "
            "share. Set mtp_num_layers to 1"
        )
    for stage in dims.stages(num_layers):
        first = stage.layers.start
        if stage.layers and shares_selection(first, freq=freq, offset=offset):
            raise MeshError(
                "each pipeline stage must start with a layer that has an indexer (indexer_types in the HF config). The "
                f"stage pp_rank={stage.pp_rank}, vp_stage={stage.vp_stage} starts with layer {first}, which shares the "
                "selection of an earlier one. Choose another pp or vp, or give a layout"
            )


def _say(name: str, value: object) -> str:
    hf_name = _HF_NAMES.get(name, name)
    return f"{name}={value}" if hf_name == name else f"{name}={value} ({hf_name} in the HF config)"
