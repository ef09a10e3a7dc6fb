"""MiMo-V2-Flash: narrow values, and in layers with a window sinks and twice as many KV heads; sigmoid-routed experts.

Published configs repeat several fields under names that engines read, and that transformers does not.
"""

from typing import TYPE_CHECKING

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Derive, Hf, Map, Mcore, count
from mcore_bridge.config.layer_kinds import sizes_by_layer
from mcore_bridge.config.rope import Rope
from mcore_bridge.config.rope_spelling import SLIDING
from mcore_bridge.config.tables import DECODER, QK_PLAIN, but, derived, published, unread
from mcore_bridge.config.tables.derived_rope import LAYER_ROPES_PARTIAL as ROPES
from mcore_bridge.config.tables.moe import EXPERT_SIZE, GROUPS, MLP_TYPES, NO_SHARED, ROUTED, SCALED, SIGMOID
from mcore_bridge.errors import ConfigError, shown
from mcore_bridge.models.blocks import GQA_OF_WIDTHS, MOE, NORMS, ROUTER_BIAS, SWIGLU, decoder
from mcore_bridge.rules.layout import COLUMN
from mcore_bridge.rules.mapping import Rules, table
from mcore_bridge.rules.mapping import of_layers as only

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_WIDTH, _SCALE = "v_head_dim", "attention_value_scale"


def _attention(hf: Hf) -> dict[str, object]:
    scale, full = hf.get(_SCALE), {**derived.HEADS.forward(hf), "softmax_type": "vanilla"}
    twice = {**hf, "num_key_value_heads": 2 * count(full, "num_query_groups")}
    windowed, kinds = {**derived.HEADS.forward(twice), "softmax_type": "learnable"}, hf["layer_types"]
    assert isinstance(kinds, list)
    sizes = sizes_by_layer((windowed if kind == SLIDING else full for kind in kinds), full)
    values = {"value_channels": count(hf, _WIDTH), "value_scale": 1.0 if scale is None else scale}
    return {**full, **values, "per_layer_config": sizes}


def _attention_back(mcore: Mcore) -> dict[str, object]:
    return {**derived.HEADS.backward(mcore), _WIDTH: mcore["value_channels"], _SCALE: mcore["value_scale"]}


def _windows_back(mcore: Mcore) -> dict[str, object]:
    """The window and its layers. transformers needs a window, even if no layer slides."""
    return {name: value for name, value in derived.WINDOWS.backward(mcore).items() if value is not None}


ATTENTION = Derive((*derived.HEADS.names, _WIDTH, _SCALE), _attention, _attention_back)
WINDOWS = Derive(derived.WINDOWS.names, derived.WINDOWS.forward, _windows_back, derived.WINDOWS.refuses)
EPSILON = Map("rms_norm_eps", "layernorm_epsilon")
REPEATED = (
    *("hybrid_layer_pattern", "moe_layer_freq", "sliding_window_size", "layernorm_epsilon", "swa_rope_theta"),
    *("swa_num_attention_heads", "swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim"),
)
"""Names under which published configs have values that transformers has by layer, or under other names."""


def _repeated(hf: Hf, ropes: Mcore) -> dict[str, object]:
    """The values under these names, and of ``rope_theta``, from the fields of transformers and the ropes."""
    kinds, experts, full, sliding = hf["layer_types"], hf["mlp_layer_types"], ropes["hf_rope"], ropes["hf_sliding_rope"]
    assert isinstance(kinds, list)
    assert isinstance(experts, list)
    assert isinstance(full, Rope)
    assert isinstance(sliding, Rope)
    return {
        "hybrid_layer_pattern": [int(kind == SLIDING) for kind in kinds],
        "moe_layer_freq": [int(kind == "sparse") for kind in experts],
        "sliding_window_size": count(hf, "sliding_window") - 1,
        "layernorm_epsilon": hf["rms_norm_eps"],
        "rope_theta": full.theta,
        "swa_rope_theta": sliding.theta,
        "swa_num_attention_heads": hf["num_attention_heads"],
        "swa_num_key_value_heads": 2 * count(hf, "num_key_value_heads"),
        "swa_head_dim": hf["head_dim"],
        "swa_v_head_dim": hf[_WIDTH],
    }


def _ropes(hf: Hf) -> dict[str, object]:
    agreed = _repeated(hf, ropes := ROPES.forward(hf))
    given = {name: hf[name] for name in agreed if hf.get(name) is not None}
    cut = {name: value[: len(agreed[name])] if isinstance(value, list) else value for name, value in given.items()}  # type: ignore[arg-type]
    if wrong := {name: shown(given[name]) for name, value in cut.items() if value != agreed[name]}:
        raise ConfigError(
            f"{', '.join(wrong)} must be {[shown(agreed[name]) for name in wrong]}, as transformers has them under "
            f"other names, found {[*wrong.values()]}: engines would read another model. Correct or delete them."
        )
    return ropes


def _ropes_back(mcore: Mcore) -> dict[str, object]:
    fields = ROPES.backward(mcore)
    others = (entry.to_hf(mcore) for entry in (ATTENTION, WINDOWS, MLP_TYPES, EPSILON))
    said = {name: value for other in others for name, value in other.items()}
    return {**_repeated({"sliding_window": 1, **said}, mcore), **fields}


ROPES_AND_REPEATED = Derive(
    (*ROPES.names, *REPEATED),
    _ropes,
    _ropes_back,
    (
        *ROPES.refuses,
        "names that engines alone read, if they say something else: one model cannot be both",
    ),
)
UNREAD = unread("attention_chunk_size", "hybrid_block_size")
ONLY = published(
    add_swa_attention_sink_bias=True,
    add_full_attention_sink_bias=False,
    n_shared_experts=0,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
)


def rules(hf: "PretrainedConfig") -> Rules:
    """The weight rules; layers with a window have sinks."""
    windowed = [layer for layer, kind in enumerate(hf.layer_types) if kind == SLIDING]
    sinks = table(("self_attention.core_attention.softmax_offset", "self_attn.attention_sink_bias", COLUMN))
    return decoder(NORMS, GQA_OF_WIDTHS, only(sinks, windowed), SWIGLU, MOE, ROUTER_BIAS)


ARCHITECTURE = Architecture(
    model_type="mimo_v2_flash",
    fields=(
        *(*but(DECODER, ATTENTION, ROPES_AND_REPEATED, EPSILON), WINDOWS, derived.biases("attention_bias", None, None)),
        *(*QK_PLAIN, *ROUTED, *SIGMOID, *NO_SHARED, SCALED, EXPERT_SIZE, MLP_TYPES, GROUPS, *ONLY, UNREAD),
    ),
    rules=rules,
    # No field of a published config counts these layers, and transformers skips them.
    mtp=lambda hf: ("model.mtp.*",),
)
