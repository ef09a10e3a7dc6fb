"""Muse Glimmer, the text model: norms without weights, a gate for each element, layers without a rope."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Const, Map
from mcore_bridge.config.tables import BIAS_ATTENTION, DENSE, NORM_SANDWICH, QK_NORMED, WINDOW_BY_LAYER, but
from mcore_bridge.config.tables.by_layer import ELEMENT_GATES
from mcore_bridge.config.tables.derived import activation
from mcore_bridge.config.tables.derived_rope import BASES
from mcore_bridge.config.tables.scales import LOGIT_SOFTCAP, scaled_scores
from mcore_bridge.models.afmoe import GATE
from mcore_bridge.models.blocks import GQA, NORMS_FOUR, O_BIAS, QKV_BIAS, SWIGLU, decoder

CENTERED = (Const("layernorm_zero_centered_gamma", True), Const("final_norm_centered", False))
UNWEIGHTED = (*QK_NORMED, Const("qk_norm_kind", "unweighted"), Const("embedding_norm", "unweighted"))
ARCHITECTURE = Architecture(
    model_type="muse_glimmer_text",
    fields=(
        *but(DENSE, *CENTERED, activation("hidden_activation", "hidden_act")),
        *(*BIAS_ATTENTION, *WINDOW_BY_LAYER, BASES, *UNWEIGHTED, *NORM_SANDWICH, *ELEMENT_GATES),
        *(Map("post_norm_eps", "post_norm_epsilon"), scaled_scores("qk_scale_factor")),
        *(Map("output_multiplier", "logit_scale"), LOGIT_SOFTCAP),
    ),
    rules=lambda hf: decoder(NORMS_FOUR, GQA, QKV_BIAS, O_BIAS, GATE, SWIGLU),
)
