"""Imported once by the server that the workers of ``pool.py`` are forked from."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from megatron.core.models.gpt import GPTModel  # noqa: F401
from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM  # noqa: F401

import mcore_bridge  # noqa: F401
