"""Qwen3-Next: linear attention in most layers, full attention with an output gate in others, and experts."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.tables import DECODER, but
from mcore_bridge.config.tables.linear_attention import DELTA
from mcore_bridge.config.tables.moe import EXPERT_SIZE, ROUTED, SHARED_BY_GATE, SOFTMAX_BY_CONFIG, SPARSE_STEP
from mcore_bridge.models.blocks import MOE, SHARED_GATED, SWIGLU, decoder, mtp_beside
from mcore_bridge.models.blocks_delta import DELTA_IN_HEAD, DELTA_LAYER

LAYER = (DELTA_LAYER, MOE, SHARED_GATED)
ARCHITECTURE = Architecture(
    model_type="qwen3_next",
    fields=(
        *(*but(DECODER, *DELTA), *ROUTED, *SOFTMAX_BY_CONFIG, *SHARED_BY_GATE),
        *(SPARSE_STEP, EXPERT_SIZE),
    ),
    rules=lambda hf: (*decoder(*LAYER, DELTA_IN_HEAD, SWIGLU), *mtp_beside(*LAYER)),
)
