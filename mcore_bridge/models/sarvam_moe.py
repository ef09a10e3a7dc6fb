"""Sarvam (experts): a glm4_moe with one tensor for q, k and v, and other names. transformers reads it since 5.24."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Map
from mcore_bridge.config.tables import but, published
from mcore_bridge.config.tables.moe import DENSE_FIRST, shared_experts
from mcore_bridge.config.tables.moe_counted import GIVEN_GROUPS, given
from mcore_bridge.models import bailing_moe_v2, glm4_moe
from mcore_bridge.models.blocks import decoder

NUMBERS = (("n_routed_experts", "num_experts"), ("n_shared_experts", "num_shared_experts"))
COUNTS = (
    *(GIVEN_GROUPS, given(shared_experts("n_shared_experts"))),
    given(DENSE_FIRST, "first_k_dense_replace"),
)
ONE_FORM = (*bailing_moe_v2.ONE_FORM, *published(use_qkv_bias=False))
OWN = (*COUNTS, *ONE_FORM, Map("use_qk_norm", "qk_layernorm", default=True), bailing_moe_v2.UNREAD)
ARCHITECTURE = Architecture(
    model_type="sarvam_moe",
    classes=("SarvamMoEForCausalLM",),
    reads_as="llama",
    published_fields=(*NUMBERS, ("attention_bias", "use_qkv_bias")),
    fields=but(glm4_moe.ARCHITECTURE.fields, *OWN),
    rules=lambda hf: decoder(bailing_moe_v2.LAYER, embedding=bailing_moe_v2.EMBEDDING),
)
