"""The text of GLM-5.3-Flash: residual streams, Kimi delta attention in most layers, and attention to pools of keys."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Const, Derive
from mcore_bridge.config.tables import but
from mcore_bridge.config.tables.linear_attention import BOUNDED_KDA
from mcore_bridge.config.tables.moe import MTP_NEVER
from mcore_bridge.config.tables.scales import MIXED
from mcore_bridge.config.tables.sparse_attention import POOLED
from mcore_bridge.models import blocks
from mcore_bridge.models.blocks_delta import KDA_NARROW, KDA_RATES
from mcore_bridge.models.blocks_sparse import INDEXER, POOLS, streams

LAYER = (blocks.NORMS, blocks.MLA, INDEXER, POOLS, KDA_NARROW, KDA_RATES, blocks.SWIGLU, blocks.MOE_BIASED)
LIMITS = Derive(
    ("swiglu_limit",),
    lambda hf: dict.fromkeys(("glu_limit", "expert_glu_limit"), hf["swiglu_limit"]),
    lambda mcore: {"swiglu_limit": mcore["glu_limit"]},
)
ARCHITECTURE = Architecture(
    model_type="glm5_next_text",
    fields=but(
        (*POOLED, *MIXED),
        *(*BOUNDED_KDA, MTP_NEVER, LIMITS, Const("limits_before_activation", True), Const("mhc_merges_evenly", True)),
    ),
    rules=lambda hf: blocks.decoder(*LAYER, streams("hc_attn_", "hc_ffn_")),
    mtp=lambda hf: (f"model.layers.{hf.num_hidden_layers}.*",),
    renamed_in_memory=((".self_attn.f_a_proj", ".self_attn.forget_gate.f_a_proj"),),
)
