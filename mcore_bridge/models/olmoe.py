"""OLMoE: norms over all heads of queries and of keys, softmax-routed experts in every layer."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Require
from mcore_bridge.config.tables import BIAS_ATTENTION, DECODER, QK_NORMED_TOGETHER, WINDOW_NONE, but
from mcore_bridge.config.tables.moe import NO_SHARED, ONE_SIZE, ROUTED, SOFTMAX_BY_CONFIG
from mcore_bridge.models.blocks import GQA, MOE, NORMS, O_BIAS, QK_NORM, QKV_BIAS, decoder

CLIP = Require("clip_qkv", (None,), "megatron-core does not clip queries, keys and values")
ARCHITECTURE = Architecture(
    model_type="olmoe",
    fields=(
        *(*but(DECODER, ONE_SIZE), *BIAS_ATTENTION, *WINDOW_NONE, *QK_NORMED_TOGETHER),
        *(*ROUTED, *SOFTMAX_BY_CONFIG, *NO_SHARED, CLIP),
    ),
    rules=lambda hf: decoder(NORMS, GQA, QKV_BIAS, O_BIAS, QK_NORM, MOE),
)
