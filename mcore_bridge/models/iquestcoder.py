"""IQuest-Coder: a llama under a name of its own."""

from dataclasses import replace

from mcore_bridge.config.fields import Require
from mcore_bridge.models import llama

UNUSED = "transformers refuses another, which no published model has"
OWN = (Require("clip_qkv", (None,), UNUSED), Require("use_sliding_window", (False, None), UNUSED))
ARCHITECTURE = replace(llama.ARCHITECTURE, model_type="iquestcoder", fields=(*llama.ARCHITECTURE.fields, *OWN))
