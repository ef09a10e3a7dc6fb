"""Sarvam (latent attention): a deepseek_v3 whose config has other names. transformers reads it since 5.24."""

from dataclasses import replace

from mcore_bridge.config.fields import Ignore
from mcore_bridge.config.tables import but
from mcore_bridge.models import deepseek_v3
from mcore_bridge.models.sarvam_moe import COUNTS, NUMBERS, ONE_FORM

OWN = (
    Ignore("other dims decide them: published files have values for an engine", ("head_dim", "q_head_dim")),
    *(*COUNTS, *ONE_FORM),
)
ARCHITECTURE = replace(
    deepseek_v3.ARCHITECTURE,
    model_type="sarvam_mla",
    classes=("SarvamMLAForCausalLM",),
    reads_as="llama",
    published_fields=NUMBERS,
    fields=but(deepseek_v3.ARCHITECTURE.fields, *OWN),
)
