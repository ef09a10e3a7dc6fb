"""nanochat: norms without weights everywhere, also behind a rope that turns the other way; no gate in the MLP."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Const
from mcore_bridge.config.tables import BIAS_ATTENTION, DENSE, NORM_UNWEIGHTED, PLAIN_MLP, QK_PLAIN, WINDOW_NONE, but
from mcore_bridge.config.tables.derived_rope import REVERSED_ROPE
from mcore_bridge.config.tables.scales import LOGIT_SOFTCAP
from mcore_bridge.models.blocks import GQA, O_BIAS, QKV_BIAS, decoder, mlp

UNWEIGHTED = (*NORM_UNWEIGHTED, Const("qk_norm_kind", "after_rope_unweighted"), Const("embedding_norm", "unweighted"))
ARCHITECTURE = Architecture(
    model_type="nanochat",
    fields=(
        *but(DENSE, *PLAIN_MLP, REVERSED_ROPE),
        *(*BIAS_ATTENTION, *WINDOW_NONE, *QK_PLAIN, *UNWEIGHTED, LOGIT_SOFTCAP),
    ),
    rules=lambda hf: decoder(GQA, QKV_BIAS, O_BIAS, mlp("fc1", "fc2"), final_norm=()),
)
