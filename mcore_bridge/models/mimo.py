"""MiMo 7B, which transformers lacks: a qwen2 whose MTP layers are not built."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Require
from mcore_bridge.config.tables import BIAS_QKV, DENSE, QK_PLAIN, WINDOW_BY_LAYER, but
from mcore_bridge.config.tables.moe import MTP_NEVER
from mcore_bridge.models.blocks import GQA, NORMS, QKV_BIAS, SWIGLU, decoder

OWN = (Require("attention_bias", (True,), "the published code has biases of q, k and v"), MTP_NEVER)
ARCHITECTURE = Architecture(
    model_type="mimo",
    classes=("MiMoForCausalLM",),
    reads_as="qwen2",
    fields=(*but(DENSE), *BIAS_QKV, *WINDOW_BY_LAYER, *QK_PLAIN, *OWN),
    rules=lambda hf: decoder(NORMS, GQA, QKV_BIAS, SWIGLU),
    # vLLM's MiMoForCausalLM skips them, since logits do not depend on them.
    mtp=lambda hf: ("model.mtp_layers.*",),
)
