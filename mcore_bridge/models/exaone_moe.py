"""K-EXAONE: norms of queries and keys, no rope in layers without a window, sigmoid-routed and shared experts.

Its MTP layer is like the first layer: a window, a rope and an MLP. So SGLang builds it, and vLLM for published configs.
"""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.tables import BIAS_NONE, DECODER, QK_NORMED, WINDOW_OR_NOPE
from mcore_bridge.config.tables.moe import GROUPS, MLP_TYPES, MTP_LIKE_FIRST, ROUTED, SCALED, SIGMOID, shared_experts
from mcore_bridge.models.blocks import GQA, MOE, NORMS, QK_NORM, SHARED, SWIGLU, decoder, mtp_beside
from mcore_bridge.rules.layout import REPLICATED
from mcore_bridge.rules.mapping import table

BIAS = table(("mlp.router.expert_bias", "mlp.e_score_correction_bias", REPLICATED))
LAYER = (NORMS, GQA, QK_NORM, SWIGLU)
ARCHITECTURE = Architecture(
    model_type="exaone_moe",
    fields=(
        *(*DECODER, *BIAS_NONE, *WINDOW_OR_NOPE, *QK_NORMED, *ROUTED, *SIGMOID, *MTP_LIKE_FIRST),
        *(SCALED, MLP_TYPES, GROUPS, shared_experts("num_shared_experts")),
    ),
    rules=lambda hf: (*decoder(*LAYER, MOE, BIAS, SHARED), *mtp_beside(*LAYER)),
    # vLLM lets further layers share norms and projection. No published model has them, and megatron-core cannot.
    mtp=lambda hf: ("mtp.*",),
)
