"""Granite 3: a llama with multipliers of embeddings, residuals, scores and logits."""

from dataclasses import replace

from mcore_bridge.config.tables.scales import MULTIPLIERS
from mcore_bridge.models import llama

ARCHITECTURE = replace(llama.ARCHITECTURE, model_type="granite", fields=(*llama.ARCHITECTURE.fields, *MULTIPLIERS))
