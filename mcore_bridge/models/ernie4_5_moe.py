"""ERNIE 4.5 (experts): ernie4_5 with routed experts (softmax scores and a bias) and shared ones in some layers."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Require
from mcore_bridge.config.tables import BIAS_NONE, unread
from mcore_bridge.config.tables.moe import MTP_NEVER
from mcore_bridge.config.tables.moe_interval import SPACED
from mcore_bridge.models.blocks import GQA, MOE, NORMS, SHARED, SWIGLU, decoder
from mcore_bridge.models.ernie4_5 import ERNIE
from mcore_bridge.rules.layout import ONE_ROW
from mcore_bridge.rules.mapping import table

OWN = (
    Require("use_bias", (False, None), "versions of transformers disagree on whether experts have biases"),
    Require("moe_use_aux_free", (True,), "transformers has the bias of the router in any case"),
    Require("moe_gate", ("topk",), "transformers computes this one for any"),
    MTP_NEVER,
    unread("moe_capacity"),
)
BIAS = table(("mlp.router.expert_bias", "mlp.moe_statics.e_score_correction_bias", ONE_ROW))
ARCHITECTURE = Architecture(
    model_type="ernie4_5_moe",
    fields=(*ERNIE, *BIAS_NONE, *SPACED, *OWN),
    rules=lambda hf: decoder(NORMS, GQA, SWIGLU, MOE, BIAS, SHARED),
    # Ernie4_5_MoePreTrainedModel of transformers ignores all names with "mtp", and has no such layers.
    mtp=lambda hf: ("model.mtp_*",),
)
