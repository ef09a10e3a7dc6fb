"""IQuest-Coder: a llama under another model_type."""

from dataclasses import replace

from mcore_bridge.config.fields import Require
from mcore_bridge.models import llama

UNUSED = "transformers refuses other values, and no published model has one"
OWN = (Require("clip_qkv", (None,), UNUSED), Require("use_sliding_window", (False, None), UNUSED))
ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    model_type="iquestcoder",
    classes=("IQuestCoderForCausalLM",),
    fields=(*llama.ARCHITECTURE.fields, *OWN),
)
