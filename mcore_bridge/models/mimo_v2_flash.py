"""MiMo-V2-Flash: narrow values, and in layers with a window sinks and twice as many KV heads; sigmoid-routed experts.

Published configs repeat several fields under names that engines read, and that transformers does not. Where a rope does
not say how much of a head it rotates, transformers rotates 0.334 of it.
"""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Map
from mcore_bridge.config.rope_spelling import FULL, SLIDING
from mcore_bridge.config.tables import DECODER, QK_PLAIN, but, derived, published, unread
from mcore_bridge.config.tables.by_layer import VALUES_AND_SINKS
from mcore_bridge.config.tables.derived import repeated
from mcore_bridge.config.tables.derived_rope import LAYER_ROPES_OF_A_THIRD
from mcore_bridge.config.tables.moe import EXPERT_SIZE, GROUPS, MLP_TYPES, NO_SHARED, ROUTED, SCALED, SIGMOID
from mcore_bridge.models.blocks import GQA_OF_WIDTHS, MOE, NORMS, ROUTER_BIAS, SWIGLU, by_kind, decoder
from mcore_bridge.rules.layout import COLUMN
from mcore_bridge.rules.mapping import table

# fmt: off
REPEATED = (
    repeated(Map("rms_norm_eps", "layernorm_epsilon"), {"layernorm_epsilon": lambda hf: hf["rms_norm_eps"]}),
    repeated(VALUES_AND_SINKS, {
        "swa_num_attention_heads": lambda hf: hf["num_attention_heads"],
        "swa_num_key_value_heads": lambda hf: 2 * hf["num_key_value_heads"],
        "swa_head_dim":            lambda hf: hf["head_dim"],
        "swa_v_head_dim":          lambda hf: hf["v_head_dim"]}),
    repeated(derived.WINDOWS_OR_DEFAULT, {
        "hybrid_layer_pattern":    lambda hf: [int(kind == SLIDING) for kind in hf["layer_types"]],
        "sliding_window_size":     lambda hf: (hf.get("sliding_window") or 1) - 1}),
    repeated(MLP_TYPES, {
        "moe_layer_freq":          lambda hf: [int(kind == "sparse") for kind in hf["mlp_layer_types"]]}),
    repeated(LAYER_ROPES_OF_A_THIRD, {
        "rope_theta":              lambda hf: hf["rope_parameters"][FULL]["rope_theta"],
        "swa_rope_theta":          lambda hf: hf["rope_parameters"][SLIDING]["rope_theta"]}),
)
# fmt: on
SINKS = table(("self_attention.core_attention.softmax_offset", "self_attn.attention_sink_bias", COLUMN))
ONLY = (
    *published(add_swa_attention_sink_bias=True, add_full_attention_sink_bias=False, n_shared_experts=0),
    *published(scoring_func="sigmoid", topk_method="noaux_tc"),
    unread("attention_chunk_size", "hybrid_block_size"),
)
ARCHITECTURE = Architecture(
    model_type="mimo_v2_flash",
    fields=(
        *(*but(DECODER, *REPEATED), derived.biases("attention_bias", None, None)),
        *(*QK_PLAIN, *ROUTED, *SIGMOID, *NO_SHARED, SCALED, EXPERT_SIZE, GROUPS, *ONLY),
    ),
    rules=lambda hf: (
        *decoder(NORMS, GQA_OF_WIDTHS, SWIGLU, MOE, ROUTER_BIAS),
        *by_kind(hf, {SLIDING: SINKS}),
    ),
    # No field of a published config counts these layers, and transformers skips them.
    mtp=lambda hf: ("model.mtp.*",),
)
