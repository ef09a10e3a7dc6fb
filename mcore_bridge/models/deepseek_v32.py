"""DeepSeek V3.2: deepseek_v3 with sparse attention, over the tokens that an indexer selects."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Const
from mcore_bridge.config.tables.sparse_attention import SPARSE, SPARSE_RELEASE
from mcore_bridge.models.blocks import SWIGLU, decoder, mtp_behind
from mcore_bridge.models.blocks_sparse import SPARSE_LAYER

ARCHITECTURE = Architecture(
    model_type="deepseek_v32",
    fields=(*SPARSE, Const("dsa_indexer_rope_interleaved", False)),
    rules=lambda hf: (*decoder(SPARSE_LAYER, SWIGLU), *mtp_behind(hf, SPARSE_LAYER)),
    megatron_core=SPARSE_RELEASE,
)
