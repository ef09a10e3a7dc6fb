"""Settings of modules that are built alone."""

from types import SimpleNamespace
from typing import Any

import torch

ALONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)


def settings(**changes: Any) -> Any:
    """The fields of a ``TransformerConfig`` that the modules read."""
    defaults = {
        "normalization": "RMSNorm",
        "layernorm_zero_centered_gamma": False,
        "params_dtype": torch.float32,
        "use_cpu_initialization": True,
        "perform_initialization": True,
        "sequence_parallel": False,
        "kv_channels": 8,
        "softmax_type": "vanilla",
        "attention_dropout": 0.0,
        "window_size": None,
        "window_attn_skip_freq": None,
    }
    return SimpleNamespace(**{**defaults, **changes})
