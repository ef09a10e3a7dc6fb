"""Refuses a ``HybridModel`` where a trainer hands over one parameter at a time: its layers are halves of ours."""

from mcore_bridge.errors import ConfigError
from mcore_bridge.rules.names import FINAL_NORM, layer_of


def require_whole_layers(name: str, num_layers: int, instead: str) -> None:
    """Raise ``ConfigError`` for a name that only a ``HybridModel`` has. Its other names are those of other layers.

    Args:
        name: that of a parameter, without wrappers.
        num_layers: the number of layers in HF.
        instead: what exports such a model.
    """
    if FINAL_NORM.match(name) or (layer_of(name) or 0) >= num_layers:
        raise ConfigError(
            f'{name} is a parameter of a HybridModel, whose layers are halves: expected the names of a model="gpt", '
            f"with {num_layers} layers. Build that, or export by {instead}"
        )
