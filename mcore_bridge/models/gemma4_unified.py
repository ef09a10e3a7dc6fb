"""Gemma 4 unified, the text: a Gemma 4 without experts."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.models.blocks_gemma import gemma4_decoder
from mcore_bridge.models.gemma4 import DENSE

ARCHITECTURE = Architecture(model_type="gemma4_unified_text", fields=DENSE, rules=gemma4_decoder)
