"""Refuse a ``HybridModel`` if a trainer passes one parameter at a time, since its layers are halves of layers."""

from mcore_bridge.errors import ConfigError
from mcore_bridge.rules.names import FINAL_NORM, layer_of


def require_whole_layers(name: str, num_layers: int, instead: str) -> None:
    """Raise ``ConfigError`` for a name that only a ``HybridModel`` has. Its other names could belong to other layers.

    Args:
        name: the name of a parameter, without wrappers.
        num_layers: the number of layers in HF.
        instead: a function that exports such a model.
    """
    if FINAL_NORM.match(name) or (layer_of(name) or 0) >= num_layers:
        raise ConfigError(
            f'{name} is a parameter of a HybridModel, whose layers are halves: expected the names of a model="gpt", '
            f"with {num_layers} layers. Build that, or export by {instead}"
        )
