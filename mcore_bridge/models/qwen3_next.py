"""Qwen3-Next: experts, behind layers of which most attend linearly by the gated delta rule, others with a gate."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Map
from mcore_bridge.config.moe import MOE, SHARED_GATED, SOFTMAX_BY_CONFIG, SPARSE_STEP
from mcore_bridge.config.tables import DECODER, but
from mcore_bridge.config.tables_delta import DELTA
from mcore_bridge.models import blocks
from mcore_bridge.models.blocks import SWIGLU, decoder, mtp_beside
from mcore_bridge.models.blocks_delta import DELTA_IN_HEAD, DELTA_LAYER

LAYER = (DELTA_LAYER, blocks.MOE, blocks.SHARED_GATED)
ARCHITECTURE = Architecture(
    model_type="qwen3_next",
    fields=(
        *(*but(DECODER, *DELTA), *MOE, *SOFTMAX_BY_CONFIG, *SHARED_GATED),
        *(SPARSE_STEP, Map("moe_intermediate_size", "moe_ffn_hidden_size")),
    ),
    rules=lambda hf: (*decoder(*LAYER, DELTA_IN_HEAD, SWIGLU), *mtp_beside(*LAYER)),
)
