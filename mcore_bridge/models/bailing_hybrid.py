"""Ling 3 and Ring 3: Kimi delta attention in most layers, latent attention with a gate for each head, and experts.

transformers writes two output projections under one name, and engines read ``o_proj`` of Kimi delta attention.
"""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Const, Field, Require
from mcore_bridge.config.tables import LATENT, but, published, unread
from mcore_bridge.config.tables.by_layer import HEAD_GATES
from mcore_bridge.config.tables.derived_latent import ROPE_OF_WHOLE
from mcore_bridge.config.tables.linear_attention import FULL_RANK_KDA, KDA
from mcore_bridge.config.tables.moe_counted import NAMED_BY_KIMI
from mcore_bridge.models import bailing_moe_v2, blocks, hy_v3
from mcore_bridge.models.blocks_delta import KDA_FULL
from mcore_bridge.rules.layout import ROW
from mcore_bridge.rules.mapping import respelled, second_names, table

NAMES = (("self_attn.o_proj.", "attention.dense."), ("self_attn.", "attention."))
SECOND = second_names(table(("self_attention.out_proj.weight", "attention.dense.weight", ROW)))
ATTENTION = {
    "full_attention": respelled((*blocks.MLA, *blocks.HEAD_GATE), NAMES),
    "linear_attention": (*respelled(KDA_FULL, NAMES[1:]), *SECOND),
}
LAYER = (blocks.NORMS, blocks.MOE, bailing_moe_v2.ROUTER_BIAS, blocks.SHARED)
LIGHTNING = "Ling 2.5 and 2.6 have lightning attention under this model_type, and transformers has none for them"
ONE_FORM: tuple[Field, ...] = (
    *(*bailing_moe_v2.ONE_FORM, Require("group_norm_size", (1, None), LIGHTNING)),
    *published(gated_attention_proj_granularity_type="head_wise", no_kda_lora=True, use_kda_lora=False),
    *published(num_kv_heads_for_linear_attn=0, use_mla_nope=False, use_qkv_bias=False, scale_router_input=False),
    *published(expert_swiglu_limit_list=None, share_expert_swiglu_limit_list=None, use_nGPT=False),
    *published(up_proj_norm=False, value_norm=False),
)
ARCHITECTURE = Architecture(
    model_type="bailing_hybrid",
    classes=("BailingMoeV3ForCausalLM",),
    fields=but(
        (*LATENT, *NAMED_BY_KIMI),
        *(*KDA, *FULL_RANK_KDA, *HEAD_GATES, ROPE_OF_WHOLE, *ONE_FORM, bailing_moe_v2.UNREAD),
        *(Const("mtp_kinds", "*E"), *published(mtp_use_kda=False)),
        unread("rotary_dim", "use_qk_norm", "linear_silu"),
    ),
    rules=lambda hf: (
        *(*blocks.decoder(*LAYER, blocks.SWIGLU, embedding=bailing_moe_v2.EMBEDDING), *blocks.by_kind(hf, ATTENTION)),
        *blocks.mtp_numbered(
            *(hf, "model.layers.*", hy_v3.AROUND, ATTENTION["full_attention"], *LAYER), offset=hf.num_hidden_layers
        ),
    ),
    published_fields=(
        *(("linear_head_dim", "head_dim"), ("num_expert_group", "n_group"), ("moe_renormalize", "norm_topk_prob")),
        *(("num_experts_per_token", "num_experts_per_tok"), ("model_max_length", "max_position_embeddings")),
    ),
    renamed_in_memory=(
        *((".attention.f_proj", ".self_attn.forget_gate.f_proj"), (".attention.dense", ".self_attn.o_proj")),
        (".attention.", ".self_attn."),
    ),
)
