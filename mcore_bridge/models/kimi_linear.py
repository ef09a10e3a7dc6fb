"""Kimi Linear: Kimi delta attention in most layers, latent attention without a rope in others, and routed experts.

transformers reads the sizes of Kimi delta attention from ``linear_attn_config`` of published configs, and so do
engines. It reads dense MLPs under either name, and writes them as those of experts, which engines do not read.
"""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.tables import LATENT, but, published, unread
from mcore_bridge.config.tables.derived_rope import UNROTATED
from mcore_bridge.config.tables.linear_attention import KDA, LOW_RANK_KDA
from mcore_bridge.config.tables.moe_counted import NAMED_BY_KIMI
from mcore_bridge.models import blocks
from mcore_bridge.models.blocks_delta import KDA as DELTA
from mcore_bridge.rules.mapping import respelled, second_names, under

ONE_FORM = published(mla_use_nope=True, moe_router_activation_func="sigmoid", use_grouped_topk=True, moe_layer_freq=1)
IN_SPARSE = (("mlp.", "block_sparse_moe."),)
LAYER = (blocks.NORMS, blocks.SWIGLU, blocks.W123)
ATTENTION = {"full_attention": blocks.MLA, "linear_attention": DELTA}
BESIDE = respelled((*blocks.SHARED, *blocks.ROUTER_BIAS), IN_SPARSE)
SECOND = second_names(under("decoder.layers.*", "model.layers.*", respelled(blocks.SWIGLU, IN_SPARSE)))
ARCHITECTURE = Architecture(
    model_type="kimi_linear",
    fields=but(
        (*LATENT, *NAMED_BY_KIMI),
        *(*KDA, *LOW_RANK_KDA, *UNROTATED, *ONE_FORM, *published(num_nextn_predict_layers=0), unread("head_dim")),
    ),
    rules=lambda hf: (*blocks.decoder(*LAYER, BESIDE), *blocks.by_kind(hf, ATTENTION), *SECOND),
    renamed_in_memory=(
        *blocks.W123_STACKS,
        (".block_sparse_moe.shared_experts.", ".mlp.shared_experts."),
        (".self_attn.f_a_proj", ".self_attn.forget_gate.f_a_proj"),
    ),
)
