"""Models with experts, of any depth."""

from typing import Any

from tests.support.strategies import tiny


def sparse(num_layers: int, **sizes: Any) -> Any:
    fields = {
        "num_hidden_layers": num_layers,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "mlp_only_layers": [0],
        "vocab_size": 640,
        **sizes,
    }
    return tiny("qwen3_moe", **fields)
