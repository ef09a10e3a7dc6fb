"""K-EXAONE: norms of queries and keys, no rope in layers without a window, sigmoid-routed and shared experts."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.tables import BIAS_NONE, DECODER, QK_NORMED, WINDOW_OR_NOPE
from mcore_bridge.config.tables.moe import GROUPS, MLP_TYPES, MTP_NEVER, ROUTED, SCALED, SIGMOID, shared_experts
from mcore_bridge.models.blocks import GQA, MOE, NORMS, QK_NORM, SHARED, SWIGLU, decoder
from mcore_bridge.rules.layout import REPLICATED
from mcore_bridge.rules.mapping import table

BIAS = table(("mlp.router.expert_bias", "mlp.e_score_correction_bias", REPLICATED))
ARCHITECTURE = Architecture(
    model_type="exaone_moe",
    fields=(
        *(*DECODER, *BIAS_NONE, *WINDOW_OR_NOPE, *QK_NORMED, *ROUTED, *SIGMOID, MTP_NEVER),
        *(SCALED, MLP_TYPES, GROUPS, shared_experts("num_shared_experts")),
    ),
    rules=lambda hf: decoder(NORMS, GQA, QK_NORM, SWIGLU, MOE, BIAS, SHARED),
    # ExaoneMoePreTrainedModel of transformers ignores them in files, and has no such layers.
    mtp=lambda hf: ("mtp.*",),
)
