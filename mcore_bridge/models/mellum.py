"""Mellum 2: a qwen3_moe with a window in some layers, which have another rope."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Ignore
from mcore_bridge.config.tables import BIAS_ATTENTION, DECODER, QK_NORMED, WINDOW_PATTERN, but
from mcore_bridge.config.tables.derived_rope import LAYER_ROPES
from mcore_bridge.config.tables.moe import EXPERT_SIZE, MLP_TYPES, MTP_NEVER, NO_SHARED, ROUTED, SOFTMAX_BY_CONFIG
from mcore_bridge.models.blocks import GQA, MOE, NORMS, O_BIAS, QK_NORM, QKV_BIAS, SWIGLU, decoder

MTP = (MTP_NEVER, Ignore("MTP layers are not built", ("mtp_layer_types", "mtp_mlp_layer_types")))
ARCHITECTURE = Architecture(
    model_type="mellum",
    fields=(
        *(*but(DECODER, LAYER_ROPES), *BIAS_ATTENTION, *WINDOW_PATTERN, *QK_NORMED, *ROUTED, *SOFTMAX_BY_CONFIG),
        *(*NO_SHARED, MLP_TYPES, EXPERT_SIZE, *MTP),
    ),
    rules=lambda hf: decoder(NORMS, GQA, QKV_BIAS, O_BIAS, QK_NORM, SWIGLU, MOE),
    # MellumPreTrainedModel of transformers ignores them in files, and has none.
    mtp=lambda hf: ("mtp.*",),
)
