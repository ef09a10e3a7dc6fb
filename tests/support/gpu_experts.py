"""A model with experts whose files are large enough."""

from tests.support.strategies import tiny

SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 8, "vocab_size": 515}


EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 128, "num_key_value_heads": 2, "num_experts": 8}


HF = tiny("qwen3_moe", **{**SIZES, **EXPERTS}, mlp_only_layers=[1], architectures=["Qwen3MoeForCausalLM"])
