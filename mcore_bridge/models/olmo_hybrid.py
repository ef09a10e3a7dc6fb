"""OLMo Hybrid: gated delta nets behind their norms in most layers, and in others attention of OLMo 3 before its norms.

transformers cuts convolutions into three equal parts when it writes files, which is wrong if values are wider than
keys. Here files have the parts and the names of published ones.
"""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.tables import DENSE, but, without
from mcore_bridge.config.tables.linear_attention import DELTA_NORMED_BEFORE
from mcore_bridge.models.blocks import GQA, NORMS, NORMS_POST, O_BIAS, QK_NORM, QKV_BIAS, SWIGLU, by_kind, decoder
from mcore_bridge.models.blocks_delta import DELTA_APART
from mcore_bridge.rules.mapping import respelled, second_names

MLP_NORM = ("post_attention_layernorm.", "feedforward_layer_norm.")
BEFORE = respelled(NORMS, (("input_layernorm.", "attention_layer_norm."), MLP_NORM))
KINDS = {
    "linear_attention": (*BEFORE, *DELTA_APART, *second_names(NORMS)),
    "full_attention": (
        *(*NORMS_POST, *GQA, *QKV_BIAS, *O_BIAS, *QK_NORM),
        *second_names(respelled(NORMS_POST[:1], (MLP_NORM,))),
    ),
}
ARCHITECTURE = Architecture(
    model_type="olmo_hybrid",
    fields=without(but(DENSE, *DELTA_NORMED_BEFORE), "position_embedding_type"),
    rules=lambda hf: (*decoder(SWIGLU), *by_kind(hf, KINDS)),
)
