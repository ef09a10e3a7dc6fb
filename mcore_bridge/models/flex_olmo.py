"""FlexOlmo: OLMo 2 with softmax-routed experts in every layer; a norm follows their sum."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.tables import BIAS_ATTENTION, DECODER, NORM_POST, QK_NORMED_TOGETHER, WINDOW_NONE, but
from mcore_bridge.config.tables.moe import NO_SHARED, ONE_SIZE, ROUTED, SOFTMAX_BY_CONFIG
from mcore_bridge.models.blocks import GQA, MOE, O_BIAS, QK_NORM, QKV_BIAS, decoder
from mcore_bridge.rules.layout import REPLICATED
from mcore_bridge.rules.mapping import table

NORMS = table(
    ("self_attention.linear_proj.post_layernorm.weight", "post_attention_layernorm.weight", REPLICATED),
    ("mlp.post_layernorm.weight", "post_feedforward_layernorm.weight", REPLICATED),
)
ARCHITECTURE = Architecture(
    model_type="flex_olmo",
    fields=(
        *(*but(DECODER, ONE_SIZE), *BIAS_ATTENTION, *WINDOW_NONE, *QK_NORMED_TOGETHER, *NORM_POST),
        *(*ROUTED, *SOFTMAX_BY_CONFIG, *NO_SHARED),
    ),
    rules=lambda hf: decoder(NORMS, GQA, QKV_BIAS, O_BIAS, QK_NORM, MOE),
)
