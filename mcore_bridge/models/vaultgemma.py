"""VaultGemma: a gemma2 without norms after attention and MLP."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.tables import GEMMA2, QK_PLAIN, without
from mcore_bridge.config.tables.scales import ATTENTION_SOFTCAP
from mcore_bridge.models.blocks import GQA, NORMS_BEFORE, O_BIAS, QKV_BIAS, SWIGLU, decoder

ARCHITECTURE = Architecture(
    model_type="vaultgemma",
    fields=(*without(GEMMA2, "norm_placement"), *QK_PLAIN, ATTENTION_SOFTCAP),
    rules=lambda hf: decoder(NORMS_BEFORE, GQA, QKV_BIAS, O_BIAS, SWIGLU),
)
