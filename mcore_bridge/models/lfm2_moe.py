"""LFM2-MoE: an LFM2 with routed experts in all layers but the first.

transformers divides the weights of a token's experts by their sum plus 1e-6, and megatron-core by their sum plus 1e-20.
"""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Map
from mcore_bridge.config.tables import DECODER, but
from mcore_bridge.config.tables.moe import EXPERT_SIZE, NO_SHARED, ROUTED, SCALED, SIGMOID
from mcore_bridge.config.tables.short_convolutions import CONVOLUTIONS, DENSE_FIRST, TIED
from mcore_bridge.models.blocks import EMBEDDING
from mcore_bridge.models.blocks_conv import CONV_EXPERTS, CONV_LAYER, CONV_MLP, CONV_NORM
from mcore_bridge.rules.mapping import under

SIGMOID_BIASED = but(SIGMOID, Map("use_expert_bias", "moe_router_enable_expert_bias"))
ARCHITECTURE = Architecture(
    model_type="lfm2_moe",
    fields=but((*DECODER, *ROUTED), *SIGMOID_BIASED, *CONVOLUTIONS, *NO_SHARED, EXPERT_SIZE, SCALED, DENSE_FIRST, TIED),
    rules=lambda hf: (
        *EMBEDDING,
        *under("decoder.layers.*", "model.layers.*", CONV_LAYER, CONV_MLP, CONV_EXPERTS),
        *CONV_NORM,
    ),
)
