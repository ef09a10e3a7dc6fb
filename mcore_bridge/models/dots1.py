"""dots.llm1: norms of queries and keys, windows in some layers, sigmoid-routed experts beside shared ones."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.tables import BIAS_ATTENTION, DECODER, QK_NORMED, WINDOW_BY_LAYER
from mcore_bridge.config.tables.moe import DENSE_FIRST, GROUPS, ROUTED, SCALED, SIGMOID, shared_experts
from mcore_bridge.models.blocks import GQA, MOE_BIASED, NORMS, O_BIAS, QK_NORM, QKV_BIAS, SWIGLU, decoder

ARCHITECTURE = Architecture(
    model_type="dots1",
    fields=(
        *(*DECODER, *BIAS_ATTENTION, *WINDOW_BY_LAYER, *QK_NORMED, *ROUTED, *SIGMOID),
        *(SCALED, DENSE_FIRST, GROUPS, shared_experts("n_shared_experts")),
    ),
    rules=lambda hf: decoder(
        *(NORMS, GQA, QKV_BIAS, O_BIAS, QK_NORM, SWIGLU, MOE_BIASED),
    ),
)
