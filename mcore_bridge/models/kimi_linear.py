"""Kimi Linear: Kimi delta attention in most layers, latent attention without a rope in others, and routed experts.

transformers reads the sizes of Kimi delta attention from ``linear_attn_config`` of published configs, and so do
engines.
"""

from dataclasses import replace

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Const, Ignore, Map, Require
from mcore_bridge.config.tables import LATENT, but, derived_rope, unread
from mcore_bridge.config.tables.linear_attention import KDA_LAYERS, KDA_SIZES
from mcore_bridge.config.tables.moe import GROUPS, IF_SEVERAL, called, shared_experts
from mcore_bridge.config.tables.moe_counted import COUNTED, SIGMOID_GROUPED
from mcore_bridge.models.blocks import GATED_MLP, MLA, NORMS, SWIGLU, W123, W123_STACKS, decoder
from mcore_bridge.models.blocks_delta import KDA
from mcore_bridge.rules.layout import REPLICATED
from mcore_bridge.rules.mapping import table, under

NO_ROPE = Ignore("no layer has a rope", derived_rope.ROPE.names)
ONE_FORM = tuple(
    Require(name, (value, None), "transformers computes this for any value")
    for name, value in {
        "mla_use_nope": True,
        "moe_router_activation_func": "sigmoid",
        "use_grouped_topk": True,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
    }.items()
)
# fmt: off
SHARED_AND_BIAS = (*under("shared_experts", "shared_experts", GATED_MLP), *table(
    ("router.expert_bias",                "gate.e_score_correction_bias",                   REPLICATED)))
# fmt: on
SPARSE = (*W123, *under("mlp", "block_sparse_moe", SHARED_AND_BIAS))
SAVED_BY_TRANSFORMERS = tuple(
    replace(rule, copy=True, exported=False)
    for rule in under("decoder.layers.*.mlp", "model.layers.*.block_sparse_moe", GATED_MLP)
)
"""transformers reads dense MLPs under either name, and writes them under this one, which engines do not read."""
ARCHITECTURE = Architecture(
    model_type="kimi_linear",
    fields=but(
        (*LATENT, *COUNTED, *SIGMOID_GROUPED),
        KDA_LAYERS,
        KDA_SIZES,
        Map("model_max_length", "max_sequence_length"),
        Map("num_experts", "num_moe_experts"),
        Map("num_experts_per_token", "moe_router_topk"),
        shared_experts("num_shared_experts"),
        called(GROUPS, n_group="num_expert_group", num_experts_per_tok="num_experts_per_token"),
        called(IF_SEVERAL, norm_topk_prob="moe_renormalize", num_experts_per_tok="num_experts_per_token"),
        NO_ROPE,
        Const("position_embedding_type", "none"),
        *ONE_FORM,
        unread("head_dim"),
    ),
    rules=lambda hf: (*decoder(NORMS, MLA, KDA, SWIGLU, SPARSE), *SAVED_BY_TRANSFORMERS),
    renamed_in_memory=(
        *W123_STACKS,
        (".block_sparse_moe.shared_experts.", ".mlp.shared_experts."),
        (".self_attn.f_a_proj", ".self_attn.forget_gate.f_a_proj"),
    ),
)
