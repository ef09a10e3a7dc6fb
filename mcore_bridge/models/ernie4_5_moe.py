"""ERNIE 4.5 (experts): ernie4_5 with routed experts (softmax scores and a bias) and shared ones in some layers."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Const, Derive, Field, Hf, Map, Mcore, Preset, Require, count
from mcore_bridge.config.layer_kinds import layers_of
from mcore_bridge.config.tables import BIAS_NONE, but, unread
from mcore_bridge.config.tables.moe import MTP_NEVER, ROUTED, shared_experts
from mcore_bridge.errors import ConfigError
from mcore_bridge.models.blocks import GQA, MOE, NORMS, SHARED, SWIGLU, decoder
from mcore_bridge.models.ernie4_5 import ERNIE
from mcore_bridge.rules.layout import ONE_ROW
from mcore_bridge.rules.mapping import table

# Tables of experts as in ERNIE: in every n-th layer of a range, with softmax scores and a bias.


def _interval(hf: Hf) -> dict[str, object]:
    """Layers from ``start`` to ``end`` (-1: the last) have experts if their number, from 1, is a multiple of a step."""
    num_layers, step = count(hf, "num_hidden_layers"), count(hf, "moe_layer_interval")
    start, end = hf.get("moe_layer_start_index"), hf.get("moe_layer_end_index")
    if not isinstance(start, int) or not isinstance(end, int):
        raise ConfigError(f"moe_layer_start_index and moe_layer_end_index must be numbers, found {start!r}, {end!r}.")
    last = num_layers - 1 if end == -1 else end
    return {"moe_layer_freq": [int(start <= i <= last and (i + 1) % step == 0) for i in range(num_layers)]}


def _interval_back(mcore: Mcore) -> dict[str, object]:
    layers = layers_of(mcore)
    sparse = [layer for layer, has_experts in enumerate(layers) if has_experts] or [len(layers)]
    step = sparse[1] - sparse[0] if len(sparse) > 1 else 1
    fields: dict[str, object] = {
        "moe_layer_start_index": sparse[0],
        "moe_layer_end_index": sparse[-1],
        "moe_layer_interval": step,
    }
    if _interval({**fields, "num_hidden_layers": len(layers)}) != {"moe_layer_freq": layers}:
        raise ConfigError(
            f"moe_layer_freq must have sparse layers at multiples of one distance only, found {layers}. Remove the "
            "override."
        )
    return fields


INTERVAL = Derive(("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"), _interval, _interval_back)

SOFTMAX_BIASED: tuple[Field, ...] = (
    Const("moe_router_score_function", "softmax"),
    Const("moe_router_enable_expert_bias", True),
    Const("moe_router_pre_softmax", True),
    Map("moe_norm_min", "router_norm_min", default=1e-12),
    Preset("moe_router_bias_update_rate", 0.0),
    Preset("moe_router_dtype", "fp32"),
)
"""The scores are a softmax in fp32. A bias only changes which experts are chosen. Weights are normalised."""
SPACED: tuple[Field, ...] = (
    *but(
        ROUTED,
        Map("moe_num_experts", "num_moe_experts", aka=("num_experts",)),
        Map("moe_k", "moe_router_topk", aka=("num_experts_per_tok",)),
    ),
    *(*SOFTMAX_BIASED, INTERVAL, shared_experts("moe_num_shared_experts"), Const("moe_shared_expert_gate", False)),
)

OWN = (
    Require("use_bias", (False, None), "versions of transformers disagree on whether experts have biases"),
    Require("moe_use_aux_free", (True,), "transformers has the bias of the router in any case"),
    Require("moe_gate", ("topk",), "transformers computes this one for any"),
    MTP_NEVER,
    unread("moe_capacity"),
)
BIAS = table(("mlp.router.expert_bias", "mlp.moe_statics.e_score_correction_bias", ONE_ROW))
ARCHITECTURE = Architecture(
    model_type="ernie4_5_moe",
    fields=(*ERNIE, *BIAS_NONE, *SPACED, *OWN),
    rules=lambda hf: decoder(NORMS, GQA, SWIGLU, MOE, BIAS, SHARED),
    # Ernie4_5_MoePreTrainedModel of transformers ignores all names with "mtp", and has no such layers. In Baidu's code
    # they read hidden states before the final norm, which also follows each MTP layer; megatron-core's read them behind
    # it. vLLM and SGLang read them behind it too, but have no norm after the layer: the sources differ.
    mtp=lambda hf: ("model.mtp_*",),
)
