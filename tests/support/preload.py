"""The imports of the server process from which the workers of ``pool.py`` are forked."""

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import peft  # noqa: F401
import pytest  # noqa: F401
from megatron.core.models.gpt import GPTModel  # noqa: F401
from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM  # noqa: F401

import mcore_bridge  # noqa: F401
from tests.support import seeing, stepping, towers  # noqa: F401

gc.collect()
gc.freeze()  # garbage collection leaves it out in workers, so they share its memory
