"""Qwen2-MoE (Qwen1.5-MoE-A2.7B): qwen2 with softmax-routed experts and a shared expert that has a gate."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Const, Map, Preset
from mcore_bridge.config.tables import DECODER, QK_PLAIN, WINDOW_OFF
from mcore_bridge.config.tables.moe import EXPERT_SIZE, ROUTED, SHARED_BY_GATE, SOFTMAX_BY_CONFIG, SPARSE_STEP
from mcore_bridge.models.blocks import GQA, MOE, NORMS, QKV_BIAS, SHARED_GATED, SWIGLU, decoder

ARCHITECTURE = Architecture(
    model_type="qwen2_moe",
    fields=(
        *(*DECODER, *WINDOW_OFF, *QK_PLAIN, *ROUTED, *SOFTMAX_BY_CONFIG, *SHARED_BY_GATE),
        *(SPARSE_STEP, EXPERT_SIZE),
        *(Map("qkv_bias", "add_qkv_bias"), Const("add_bias_linear", False), Preset("attention_output_bias", False)),
    ),
    rules=lambda hf: decoder(NORMS, GQA, QKV_BIAS, SWIGLU, MOE, SHARED_GATED),
)
