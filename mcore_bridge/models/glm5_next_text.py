"""The text of GLM-5.3-Flash: residual streams, Kimi delta attention in most layers, and attention to pools of keys."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Const, Ignore, Require
from mcore_bridge.config.tables import but, published
from mcore_bridge.config.tables.by_layer import ONE_LIMIT
from mcore_bridge.config.tables.linear_attention import BOUNDED_KDA
from mcore_bridge.config.tables.moe import MTP_NEVER
from mcore_bridge.config.tables.scales import MIXED
from mcore_bridge.config.tables.sparse_attention import POOLED
from mcore_bridge.models import blocks
from mcore_bridge.models.blocks_delta import KDA_NARROW, KDA_RATES
from mcore_bridge.models.blocks_sparse import INDEXER, POOLS, streams

LAYER = (blocks.NORMS, blocks.SWIGLU, blocks.MOE_BIASED, streams("hc_attn_", "hc_ffn_"))
ATTENTION = {
    "linear_attention": (*KDA_NARROW, *KDA_RATES),
    "indexed_attention": (*blocks.MLA, *INDEXER, *POOLS),
}
ARCHITECTURE = Architecture(
    model_type="glm5_next_text",
    fields=but(
        (*POOLED, *MIXED, Const("mhc_merges_evenly", True)),
        *(*BOUNDED_KDA, MTP_NEVER, ONE_LIMIT, Const("limits_before_activation", True)),
        *published(mhc=True, mla_use_nope=True, index_kpool_compress=True),
        Require("moe_router_dtype", ("float32", None), "transformers always routes in fp32"),
        Ignore("it only affects drafts of inference engines", ("index_share_for_mtp_iteration",)),
        Ignore("no layer has a rope", ("indexer_rope_interleave",)),
    ),
    rules=lambda hf: (*blocks.decoder(*LAYER), *blocks.by_kind(hf, ATTENTION)),
    mtp=lambda hf: (f"model.layers.{hf.num_hidden_layers}.*",),
    renamed_in_memory=((".self_attn.f_a_proj", ".self_attn.forget_gate.f_a_proj"),),
)
