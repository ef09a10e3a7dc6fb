"""Llama and the families closest to it: every rope, bias, window and tied embedding."""

from tests.zoo import case, rope

LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8.0, "beta_slow": 1.0}
WINDOWED = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2, "layer_types": None}
CASES = {
    "llama": case("llama", vocab_size=97),
    "llama-biases-tied": case("llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "llama-attention-bias": case("llama", attention_bias=True),
    "llama-square": case("llama", hidden_size=64, head_dim=8, intermediate_size=64, vocab_size=64),
    "llama-gelu": case("llama", hidden_act="gelu_pytorch_tanh"),
    "llama-mha-derived-head-dim": case("llama", num_key_value_heads=8, head_dim=None),
    "llama-one-group": case("llama", num_key_value_heads=1),
    "llama-llama3": case("llama", **rope("llama3", **LLAMA3)),
    "llama-linear": case("llama", **rope("linear", factor=4.0)),
    "llama-dynamic": case("llama", **{**rope("dynamic", factor=4.0), "max_position_embeddings": 16}),
    "llama-yarn": case("llama", **rope("yarn", **YARN)),
    "llama-yarn-attention-factor": case("llama", **rope("yarn", **YARN, attention_factor=1.4)),
    "mistral": case("mistral", sliding_window=None),
    "mistral-window": case("mistral", sliding_window=5),
    "qwen2": case("qwen2", hidden_size=192),
    "qwen2-window": case("qwen2", hidden_size=192, **WINDOWED),
    "qwen3": case("qwen3"),
    "qwen3-bias-window": case("qwen3", attention_bias=True, **WINDOWED),
    "qwen3-yarn-tied": case("qwen3", **rope("yarn", **YARN), tie_word_embeddings=True),
}
