"""InternLM3: a llama with biases everywhere or nowhere."""

from dataclasses import replace

from mcore_bridge.models import llama

ARCHITECTURE = replace(llama.ARCHITECTURE, model_type="internlm3", classes=("InternLM3ForCausalLM",))
