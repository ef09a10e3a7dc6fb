"""Whether a mesh fits a model: every division that megatron-core makes while it builds, before anything is built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mcore_bridge.config.tables.derived_sparse import shares_selection
from mcore_bridge.errors import MeshError

if TYPE_CHECKING:
    from mcore_bridge.config.mesh.parallel_dims import ParallelDims

_HF_NAMES = {
    "num_layers": "num_hidden_layers",
    "num_query_groups": "num_key_value_heads",
    "ffn_hidden_size": "intermediate_size",
    "kv_channels": "head_dim",
    "moe_ffn_hidden_size": "moe_intermediate_size",
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
        settings: ``TransformerConfig`` fields and ``GPTModel`` arguments by name, ``num_layers`` among them. What is
            absent or None is not checked.

    Raises:
        MeshError: with the field, its name in the HF config, its value, and what to change.
    """
    for name, axis in _DIVIDED:
        _require_divided(dims, settings, name, axis)
    if not _is_all_moe(settings):
        _require_divided(dims, settings, "ffn_hidden_size", "tp")
    if dims.ep > 1 and settings.get("num_moe_experts") is None:
        raise MeshError(f"ep={dims.ep} needs a model with experts, this one has none: use ep=1")
    if dims.etp > 1 and settings.get("num_moe_experts") and settings.get("add_bias_linear"):
        raise MeshError(f"etp={dims.etp} must be 1: megatron-core cannot cut experts that have biases; use ep instead")
    if not settings.get("multi_latent_attention"):
        _check_groups(dims, settings)
    if settings.get("experimental_attention_variant") == "gated_delta_net":
        _check_linear_heads(dims, settings)
    if settings.get("experimental_attention_variant") == "dsa" and dims.tp > 1 and not dims.sp:
        raise MeshError(f"tp={dims.tp} needs sp=True: megatron-core's sparse attention has no other way; set sp=True")
    _check_split(dims, settings)
    _check_shared_selections(dims, settings)


def _require_divided(dims: ParallelDims, settings: Mapping[str, object], name: str, axis: str) -> None:
    value, size = settings.get(name), getattr(dims, axis)
    if isinstance(value, int) and value % size:
        raise MeshError(f"{axis}={size} must divide {_say(name, value)}: choose another {axis}")


def _is_all_moe(settings: Mapping[str, object]) -> bool:
    """Then no layer has the dense MLP of ``ffn_hidden_size``."""
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
            f"tp={dims.tp} must divide {_say('num_query_groups', groups)} or be a multiple of it: megatron-core cannot "
            "share key and value heads otherwise; choose such a tp"
        )
    num_heads = heads * (2 if settings.get("attention_output_gate") else 1) + 2 * groups
    if isinstance(channels, int) and num_heads * channels % dims.tp:
        raise MeshError(
            f"tp={dims.tp} must divide the {num_heads * channels} rows of linear_qkv (num_attention_heads={heads}, "
            f"{_say('num_query_groups', groups)}, {_say('kv_channels', channels)}): choose a smaller tp"
        )


def _check_linear_heads(dims: ParallelDims, settings: Mapping[str, object]) -> None:
    """A head of linear attention keeps one state for the whole sequence: unlike key and value heads it is never cut."""
    heads = settings.get("linear_num_key_heads")  # whose multiple the value heads are
    if isinstance(heads, int) and heads % (dims.tp * dims.cp):
        raise MeshError(
            f"tp={dims.tp} times cp={dims.cp} must divide linear_num_key_heads={heads}: megatron-core deals out whole "
            "heads of linear attention over both; choose a smaller tp or cp"
        )


def _check_split(dims: ParallelDims, settings: Mapping[str, object]) -> None:
    num_layers = settings.get("num_layers")
    if not isinstance(num_layers, int):
        raise MeshError(f"num_layers (num_hidden_layers in the HF config) must be an integer, found {num_layers!r}")
    wanted = settings.get("mtp_num_layers") or 0
    with_embedding, *others = dims.stages(num_layers)
    if any(stage.num_mtp_layers for stage in others if stage.pp_rank == with_embedding.pp_rank):
        raise MeshError(
            f"layout {dims.layout!r} puts MTP layers ('m') on the rank of the embedding ('E'), which would hold two "
            "copies of it; put them on another pipeline rank, or into the stage of the embedding"
        )
    if wanted and isinstance(settings.get("window_attn_skip_freq") or settings.get("no_rope_freq"), list):
        raise MeshError(
            "mtp_num_layers must be None: it is not known which window or rope MTP layers of this model have"
        )
    linear = settings.get("linear_attention_freq")
    if wanted and isinstance(linear, list) and linear[num_layers - 1]:
        raise MeshError("mtp_num_layers must be None: MTP layers are like the last layer, which attends linearly here")
    placed = sum(stage.num_mtp_layers for stage in dims.stages(num_layers))
    if dims.layout is not None and placed != wanted:
        raise MeshError(
            f"layout {dims.layout!r} places {placed} MTP layers ('m'), expected {_say('mtp_num_layers', wanted)}"
        )


def _check_shared_selections(dims: ParallelDims, settings: Mapping[str, object]) -> None:
    """What an indexer selects stays in its stage, and MTP layers count from one again."""
    freq, offset = settings.get("dsa_indexer_topk_freq", 1), settings.get("dsa_indexer_skip_topk_offset", 0)
    num_layers, num_mtp_layers = settings["num_layers"], settings.get("mtp_num_layers") or 0
    assert isinstance(freq, int)
    assert isinstance(offset, int)
    assert isinstance(num_layers, int)
    assert isinstance(num_mtp_layers, int)
    if freq > 1 and num_mtp_layers > 1:
        raise MeshError(f"mtp_num_layers={num_mtp_layers} must be 1: it is not known what further ones would share")
    for stage in dims.stages(num_layers):
        first = stage.layers.start
        if stage.layers and shares_selection(first, freq=freq, offset=offset):
            raise MeshError(
                f"each pipeline stage must start with a layer that has an indexer, but pp_rank={stage.pp_rank}, "
                f"vp_stage={stage.vp_stage} starts with layer {first}, which shares the selection of one in front of "
                "it (indexer_types in the HF config); choose another pp or vp, or say in layout where to cut"
            )


def _say(name: str, value: object) -> str:
    hf_name = _HF_NAMES.get(name, name)
    return f"{name}={value}" if hf_name == name else f"{name}={value} ({hf_name} in the HF config)"
