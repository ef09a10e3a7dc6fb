"""Kimi K2: deepseek_v3 with another model_type, which transformers lacks."""

from dataclasses import replace

from mcore_bridge.models import deepseek_v3

ARCHITECTURE = replace(
    deepseek_v3.ARCHITECTURE, model_type="kimi_k2", classes=("DeepseekV3ForCausalLM",), reads_as="deepseek_v3"
)
