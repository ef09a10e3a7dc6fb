"""Sarvam (experts): a glm4_moe with one tensor for q, k and v, and other names. transformers reads it since 5.24."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Map
from mcore_bridge.config.tables import but, published, unread
from mcore_bridge.config.tables.moe import DENSE_FIRST, shared_experts
from mcore_bridge.config.tables.moe_counted import GIVEN_GROUPS, given
from mcore_bridge.models import bailing_moe_v2, glm4_moe
from mcore_bridge.models.blocks import decoder

NUMBERS = (("n_routed_experts", "num_experts"), ("n_shared_experts", "num_shared_experts"))
COUNTS = (
    *(GIVEN_GROUPS, given(shared_experts("n_shared_experts"))),
    given(DENSE_FIRST, "first_k_dense_replace"),
)
ONE_FORM = (
    *published(score_function="sigmoid", moe_router_enable_expert_bias=True, router_dtype="fp32", use_rmsnorm=True),
    *published(use_bias=False, use_qkv_bias=False, mlp_bias=False, embedding_dropout=0.0, output_dropout=0.0),
)
OWN = (
    *(*COUNTS, *ONE_FORM),
    Map("use_qk_norm", "qk_layernorm", default=True),
    unread("max_window_layers", "moe_shared_expert_intermediate_size", "mtp_loss_scaling_factor"),
)
ARCHITECTURE = Architecture(
    model_type="sarvam_moe",
    classes=("SarvamMoEForCausalLM",),
    reads_as="llama",
    published_fields=(*NUMBERS, ("attention_bias", "use_qkv_bias")),
    fields=but(glm4_moe.ARCHITECTURE.fields, *OWN),
    rules=lambda hf: decoder(bailing_moe_v2.LAYER, embedding=bailing_moe_v2.EMBEDDING),
)
