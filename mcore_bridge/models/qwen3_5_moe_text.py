"""Qwen3.5 (experts), the text model: qwen3_5_text with softmax-routed experts and a gated shared one in every layer."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Ignore
from mcore_bridge.config.tables import DECODER, but
from mcore_bridge.config.tables.linear_attention import DELTA, NO_MIXED_MLP
from mcore_bridge.config.tables.moe import EXPERT_SIZE, ROUTED, SHARED_BY_GATE, SOFTMAX_NORMALISED
from mcore_bridge.models.blocks import MOE, SHARED_GATED, decoder, mtp_beside
from mcore_bridge.models.blocks_delta import DELTA_IN, DELTA_LAYER

NO_DENSE = Ignore("no layer has a dense MLP", ("intermediate_size",))
LAYER = (DELTA_LAYER, MOE, SHARED_GATED)
ARCHITECTURE = Architecture(
    model_type="qwen3_5_moe_text",
    fields=(
        *(*but(DECODER, *DELTA, NO_DENSE), *ROUTED, *SOFTMAX_NORMALISED, *SHARED_BY_GATE, NO_MIXED_MLP),
        EXPERT_SIZE,
    ),
    rules=lambda hf: (*decoder(*LAYER, DELTA_IN), *mtp_beside(*LAYER)),
)
