"""Ministral (2410): a mistral in which some layers slide over a window."""

from dataclasses import replace

from mcore_bridge.config.tables import BIAS_NONE, DENSE, QK_PLAIN, WINDOW_PATTERN
from mcore_bridge.models import mistral

ARCHITECTURE = replace(
    mistral.ARCHITECTURE, model_type="ministral", fields=(*DENSE, *BIAS_NONE, *WINDOW_PATTERN, *QK_PLAIN)
)
