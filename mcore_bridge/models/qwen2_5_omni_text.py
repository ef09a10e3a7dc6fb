"""Qwen2.5-Omni, the text model of its thinker: a qwen2_vl_text."""

from dataclasses import replace

from mcore_bridge.models import qwen2_vl_text

ARCHITECTURE = replace(qwen2_vl_text.ARCHITECTURE, model_type="qwen2_5_omni_text")
