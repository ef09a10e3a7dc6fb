"""MiMo 7B, which transformers lacks: a qwen2, and MTP layers whose projection multiplies hidden states first.

An MTP layer reads the hidden states behind the final norm, as in megatron-core and SGLang. vLLM passes them before it.
"""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Require
from mcore_bridge.config.tables import BIAS_QKV, DENSE, QK_PLAIN, WINDOW_BY_LAYER, but
from mcore_bridge.config.tables.moe import MTP_ON_REQUEST
from mcore_bridge.models.blocks import GQA, NORMS, QKV_BIAS, SWIGLU, around_mtp, decoder, mtp_numbered

OWN = (Require("attention_bias", (True,), "the published code has biases of q, k and v"), MTP_ON_REQUEST)
LAYER = (NORMS, GQA, QKV_BIAS, SWIGLU)
AROUND = around_mtp("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", hidden_first=True)
ARCHITECTURE = Architecture(
    model_type="mimo",
    classes=("MiMoForCausalLM",),
    reads_as="qwen2",
    fields=(*but(DENSE), *BIAS_QKV, *WINDOW_BY_LAYER, *QK_PLAIN, *OWN),
    rules=lambda hf: (*decoder(*LAYER), *mtp_numbered(hf, "model.mtp_layers.*", AROUND, *LAYER)),
)
