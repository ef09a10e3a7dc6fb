"""Qwen3-MoE: qwen3 with softmax-routed experts in all layers, or in some."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.tables import BIAS_ATTENTION, DECODER, QK_NORMED, WINDOW_IF_USED
from mcore_bridge.config.tables.moe import EXPERT_SIZE, NO_SHARED, ROUTED, SOFTMAX_BY_CONFIG, SPARSE_STEP
from mcore_bridge.models.blocks import GQA, MOE, NORMS, O_BIAS, QK_NORM, QKV_BIAS, SWIGLU, decoder

ARCHITECTURE = Architecture(
    model_type="qwen3_moe",
    fields=(
        *(*DECODER, *BIAS_ATTENTION, *WINDOW_IF_USED, *QK_NORMED, *ROUTED, *SOFTMAX_BY_CONFIG, *NO_SHARED),
        *(SPARSE_STEP, EXPERT_SIZE),
    ),
    rules=lambda hf: decoder(NORMS, GQA, QKV_BIAS, O_BIAS, QK_NORM, SWIGLU, MOE),
)
