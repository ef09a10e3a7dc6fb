"""GLM-5: deepseek_v32 with an indexer that rotates neighbouring dims, and layers that may share a selection."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Const, Ignore, Require
from mcore_bridge.config.tables.sparse_attention import SHARING, SPARSE, SPARSE_RELEASE
from mcore_bridge.models.blocks import SWIGLU, decoder, mtp_behind
from mcore_bridge.models.blocks_sparse import SPARSE_LAYER

ARCHITECTURE = Architecture(
    model_type="glm_moe_dsa",
    fields=(
        *(*SPARSE, SHARING, Const("dsa_indexer_rope_interleaved", True)),
        Require("indexer_rope_interleave", (True, None), "transformers always rotates neighbours"),
        Require("moe_router_dtype", ("float32", None), "transformers always routes in fp32"),
        Ignore("transformers has made n_routed_experts of it", ("num_experts",)),
        Ignore("it only affects drafts of inference engines", ("index_share_for_mtp_iteration",)),
    ),
    rules=lambda hf: (*decoder(SPARSE_LAYER, SWIGLU), *mtp_behind(hf, SPARSE_LAYER)),
    megatron_core=SPARSE_RELEASE,
)
