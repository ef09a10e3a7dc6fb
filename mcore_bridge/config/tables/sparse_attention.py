"""The config table, with its entries, of sparse attention, whose indexer selects tokens for each query.

In megatron-core the layers up to ``offset`` (counted from 1) have an indexer, and after that every ``freq``-th layer.
"""

from mcore_bridge.config.fields import Const, Derive, Field, Hf, Ignore, Map, Mcore, Preset, Require, count
from mcore_bridge.config.layer_kinds import shares_selection, sizes_by_layer, values_of_layers
from mcore_bridge.config.rope import rope_from
from mcore_bridge.config.rope_spelling import FULL
from mcore_bridge.config.tables import LATENT, but, without
from mcore_bridge.config.tables.derived_latent import ONE_EPSILON, UNROTATED_HEADS
from mcore_bridge.config.tables.derived_rope import UNROTATED
from mcore_bridge.config.tables.moe import MLP_TYPES
from mcore_bridge.config.tables.moe_counted import COUNTED, SIGMOID_GROUPED
from mcore_bridge.errors import ConfigError, shown
from mcore_bridge.installed import Release

_KINDS = ("full", "shared")
_SCHEDULE = ("index_topk_freq", "index_skip_topk_offset", "index_topk_pattern")


def _kinds(num_layers: int, freq: int, offset: int) -> list[str]:
    return [_KINDS[shares_selection(layer, freq=freq, offset=offset)] for layer in range(num_layers)]


def _sharing(hf: Hf) -> dict[str, object]:
    num_layers, kinds = count(hf, "num_hidden_layers"), hf.get("indexer_types")
    if not isinstance(kinds, list) or len(kinds) != num_layers or set(kinds) - set(_KINDS) or kinds[0] != "full":
        raise ConfigError(
            f"indexer_types must name one of {_KINDS} for each of the {num_layers} layers, 'full' for the first one, "
            f"found {kinds!r}."
        )
    _require_schedule(hf, kinds)
    if "shared" not in kinds:
        return {"dsa_indexer_topk_freq": 1, "dsa_indexer_skip_topk_offset": 0}
    offset = kinds.index("shared")
    after = kinds[offset:]
    freq = after.index("full") + 1 if "full" in after else num_layers
    if kinds != _kinds(num_layers, freq, offset):
        raise ConfigError(
            "indexer_types must repeat with one period from the first shared layer on, as megatron-core can express "
            f"nothing else; found {kinds!r}."
        )
    return {"dsa_indexer_topk_freq": freq, "dsa_indexer_skip_topk_offset": offset}


def _require_schedule(hf: Hf, kinds: list[str]) -> None:
    """Raise ``ConfigError`` if these fields contradict ``indexer_types``: with it, transformers ignores them."""
    pattern, freq, offset = hf.get("index_topk_pattern"), hf.get("index_topk_freq"), hf.get("index_skip_topk_offset", 2)
    if pattern is not None:
        letters = {"F": "full", "S": "shared"}
        scheduled = [letters.get(kind, kind) for kind in pattern] if isinstance(pattern, str | list) else None
    elif isinstance(freq, int) and isinstance(offset, int):
        layers = range(len(kinds))
        scheduled = [_KINDS[max(layer - offset + 1, 0) % max(freq, 1) != 0] for layer in layers]
    else:
        return
    if scheduled != kinds:
        schedule = {name: hf[name] for name in _SCHEDULE if hf.get(name) is not None}
        raise ConfigError(f"indexer_types={kinds!r} and {schedule} must agree for each layer. Delete the latter.")


def _sharing_back(mcore: Mcore) -> dict[str, object]:
    num_layers, freq, offset = (
        mcore[name] for name in ("num_layers", "dsa_indexer_topk_freq", "dsa_indexer_skip_topk_offset")
    )
    assert isinstance(num_layers, int)
    assert isinstance(freq, int)
    assert isinstance(offset, int)
    return {"indexer_types": _kinds(num_layers, freq, offset)}


_SPELLINGS = {"indexed_attention", "deepseek_sparse_attention"}
"""Names of the only kind of layer, in transformers 5.23 and before it."""


def _indexed(hf: Hf) -> dict[str, object]:
    kinds = hf.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or set(kinds) - _SPELLINGS):
        raise ConfigError(f"layer_types must be 'indexed_attention' for every layer, found {kinds!r}. Delete it.")
    return {}


_NOT_PERIODIC = "`indexer_types` that are not periodic after the first shared layer: megatron-core shares by a period"
_NOT_INDEXED = "`layer_types` other than `indexed_attention`: the indexer is in every layer"
SHARING = Derive(("indexer_types", *_SCHEDULE), _sharing, _sharing_back, (_NOT_PERIODIC,))
ALL_INDEXED = Derive(("layer_types",), _indexed, lambda mcore: {}, (_NOT_INDEXED,))


SPARSE_RELEASE = Release(
    "0.19.2",
    "earlier releases have no sparse attention in the layer specs of GPT models. Their indexer computes only in bf16, "
    "with a CUDA kernel of fast_hadamard_transform and another epsilon",
)
INDEXER: tuple[Field, ...] = (
    Ignore("transformers always replaces it by qk_rope_head_dim", ("head_dim",)),
    Require("moe_layer_freq", (1, None), "transformers reads mlp_layer_types instead"),
    Map("index_n_heads", "dsa_indexer_n_heads"),
    Map("index_head_dim", "dsa_indexer_head_dim"),
    Map("index_topk", "dsa_indexer_topk"),
)
INDEXED: tuple[Field, ...] = (*COUNTED, *SIGMOID_GROUPED, MLP_TYPES, ALL_INDEXED, *INDEXER)
"""An indexer in each layer, and sigmoid-routed experts after dense layers."""
SPARSE: tuple[Field, ...] = (
    *but(
        LATENT,
        Const("qk_layernorm", True),  # here this decides whether latents have norms
        Require("attention_dropout", (0.0, 0), "megatron-core's sparse attention drops nothing"),
        Const("attention_dropout", 0.0),
    ),
    *INDEXED,
    Const("experimental_attention_variant", "dsa"),
    Const("dsa_indexer_scoring_relu", True),
    Const("dsa_indexer_k_norm_epsilon", 1e-6),
    Preset("dsa_indexer_rotate_activation", False),  # orthogonal: it changes scores by rounding only
    Preset("dsa_indexer_loss_coeff", 0.0),  # the trainer computes the indexer's own loss
    Preset("cp_comm_type", "allgather"),  # this attention supports no other
)
"""Latent attention with an indexer in each layer, by megatron-core's modules."""
SELECTED: tuple[Field, ...] = (
    *but(LATENT, Require("rope_interleave", (False, None), "transformers rotates halves, not neighbours")),
    *(*INDEXED, SHARING, Const("softmax_type", "learnable")),
    Const("dsa_indexer_loss_coeff", 0.0),  # indexers of ours are frozen
)
"""Latent attention with sinks and indexers, by modules of ours (``factory/modules/selection.py``)."""


def _all_full(hf: Hf) -> dict[str, object]:
    kinds, indexers = hf.get("layer_types"), hf.get("indexer_types")
    if (
        not isinstance(kinds, list)
        or not isinstance(indexers, list)
        or len(kinds) != len(indexers)
        or any(kind != "linear_attention" and own != "full" for kind, own in zip(kinds, indexers, strict=True))
    ):
        raise ConfigError(
            f"indexer_types must name one kind for each layer, 'full' for layers with attention, found {indexers!r}. "
            "Nobody has written shared selections among layers of linear attention."
        )
    return {"dsa_indexer_topk_freq": 1, "dsa_indexer_skip_topk_offset": 0}


def _all_full_back(mcore: Mcore) -> dict[str, object]:
    return {"indexer_types": ["full"] * count(mcore, "num_layers")}


_NOT_FULL = "`indexer_types` other than `full` for a layer with attention: nobody has written shared selections here"
POOLED: tuple[Field, ...] = (
    *but(without(LATENT, "latent_norm_epsilon"), UNROTATED_HEADS, ONE_EPSILON, *UNROTATED),
    *(*COUNTED, *SIGMOID_GROUPED, *INDEXER),
    *(Const("rope_type", "rope"), Const("apply_rope_fusion", False)),  # yarn and its kernel need rotated dims
    Derive(("indexer_types",), _all_full, _all_full_back, (_NOT_FULL,)),
    Ignore("transformers has made indexer_types of them", _SCHEDULE),
    Map("index_kpool", "dsa_indexer_pool"),
    Require("index_kpool_always_select_tail", (True,), "a query would not see itself in a pool that is not complete"),
    Const("dsa_indexer_loss_coeff", 0.0),
)
"""Latent attention without a rope in some layers, whose indexers select pools of keys."""


_BLOCK_LAYER = "minimax_m3_sparse"


def _blocks(hf: Hf) -> dict[str, object]:
    num_layers, kinds = count(hf, "num_hidden_layers"), hf.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != num_layers or set(kinds) - {FULL, _BLOCK_LAYER}:
        raise ConfigError(
            f"layer_types must have {FULL!r} or {_BLOCK_LAYER!r} for each of the {num_layers} layers, found "
            f"{shown(kinds)}."
        )
    chosen, local = count(hf, "index_topk_blocks"), hf.get("index_local_blocks")
    if not isinstance(local, int) or not 0 <= local <= chosen:
        raise ConfigError(
            f"index_local_blocks must be a number from 0 to index_topk_blocks={chosen}, found {shown(local)}: which of "
            "them are selected would depend on the device."
        )
    model: dict[str, object] = {"dsa_indexer_topk": chosen}
    layers = [{"dsa_indexer_topk": chosen if kind == _BLOCK_LAYER else None} for kind in kinds]
    return {**model, "dsa_indexer_local_blocks": local, "per_layer_config": sizes_by_layer(layers, model)}


def _blocks_back(mcore: Mcore) -> dict[str, object]:
    own = values_of_layers(mcore, "dsa_indexer_topk", count(mcore, "num_layers"))
    return {
        "layer_types": [FULL if chosen is None else _BLOCK_LAYER for chosen in own],
        "index_topk_blocks": mcore["dsa_indexer_topk"],
        "index_local_blocks": mcore["dsa_indexer_local_blocks"],
    }


def _block_heads(hf: Hf) -> dict[str, object]:
    heads, dim, all_heads = (count(hf, name) for name in ("index_n_heads", "index_head_dim", "num_attention_heads"))
    rotated = rope_from(hf).rotary_dim
    if all_heads % heads or dim < rotated:
        raise ConfigError(
            f"index_n_heads must divide num_attention_heads={all_heads}, and index_head_dim must be at least "
            f"{rotated}, the number of rotated dims; found {heads} and {dim}."
        )
    return {"dsa_indexer_n_heads": heads, "dsa_indexer_head_dim": dim}


def _block_heads_back(mcore: Mcore) -> dict[str, object]:
    return {"index_n_heads": mcore["dsa_indexer_n_heads"], "index_head_dim": mcore["dsa_indexer_head_dim"]}


_OWN_AND_FROZEN: tuple[Field, ...] = (
    Const("dsa_indexer_topk_freq", 1),
    Const("dsa_indexer_skip_topk_offset", 0),
    Const("dsa_indexer_loss_coeff", 0.0),
)
BLOCKS: tuple[Field, ...] = (
    Derive(
        ("layer_types", "index_topk_blocks", "index_local_blocks"),
        _blocks,
        _blocks_back,
        ("`index_local_blocks` above `index_topk_blocks`: the choice among local blocks would depend on the device",),
    ),
    Derive(
        ("index_n_heads", "index_head_dim"),
        _block_heads,
        _block_heads_back,
        ("`index_head_dim` below the number of rotated dims: transformers would cut the angles apart",),
    ),
    Map("index_block_size", "dsa_indexer_block"),
    *_OWN_AND_FROZEN,
)
"""Attention whose indexers select blocks of keys, in some layers."""


def _mean_pools(hf: Hf) -> dict[str, object]:
    heads, dim, pool, budget = (
        count(hf, f"indexer_{name}") for name in ("n_heads", "head_dim", "compress_ratio", "budget")
    )
    rotated = rope_from(hf).rotary_dim
    if budget % pool or dim < rotated or hf.get("indexer_kv_heads") != 1:
        raise ConfigError(
            f"indexer_budget must be a multiple of indexer_compress_ratio={pool}, indexer_head_dim at least {rotated}, "
            f"the number of rotated dims, and indexer_kv_heads 1; found {budget}, {dim} and "
            f"{shown(hf.get('indexer_kv_heads'))}."
        )
    sizes = {"dsa_indexer_n_heads": heads, "dsa_indexer_head_dim": dim}
    return {**sizes, "dsa_indexer_pool": pool, "dsa_indexer_topk": budget}


def _mean_pools_back(mcore: Mcore) -> dict[str, object]:
    return {
        "indexer_n_heads": mcore["dsa_indexer_n_heads"],
        "indexer_kv_heads": 1,
        "indexer_head_dim": mcore["dsa_indexer_head_dim"],
        "indexer_compress_ratio": mcore["dsa_indexer_pool"],
        "indexer_budget": mcore["dsa_indexer_topk"],
    }


MEAN_POOLS: tuple[Field, ...] = (
    Derive(
        tuple(f"indexer_{name}" for name in ("n_heads", "kv_heads", "head_dim", "compress_ratio", "budget")),
        _mean_pools,
        _mean_pools_back,
        ("`indexer_n_heads=None`: transformers builds no attention without an indexer",),
    ),
    *_OWN_AND_FROZEN,
)
"""Attention whose indexers select pools of keys, by means of keys."""
