"""Shared tables of residual streams: the weights by which each layer reads and writes them, and their merge."""

from mcore_bridge.rules.layout import REPLICATED
from mcore_bridge.rules.mapping import Rules, table


def gates(mcore: str, hf: str) -> Rules:
    """The three tensors of the gates at ``mcore``, whose HF names begin with ``hf``."""
    return table(*((f"{mcore}.{name}", f"{hf}{name}", REPLICATED) for name in ("fn", "base", "scale")))


def streams(attention: str, mlp: str) -> Rules:
    """The gates of a layer, from the beginnings of their HF names."""
    return (*gates("input_layernorm.connection", attention), *gates("pre_mlp_layernorm.connection", mlp))


def merge(hf: str) -> Rules:
    """The gates before the final norm."""
    return gates("decoder.final_layernorm.merge", hf)
