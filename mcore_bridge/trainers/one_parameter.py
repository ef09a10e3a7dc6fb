"""The rule of a single parameter that a trainer passes. Adapters and halves of layers cannot be passed alone."""

from mcore_bridge.errors import ConfigError
from mcore_bridge.rules.adapters import is_adapter
from mcore_bridge.rules.mapping import Binding, WeightMapping
from mcore_bridge.rules.names import FINAL_NORM, Numbering, canonical, layer_of


def binding_of(name: str, mapping: WeightMapping, numbering: Numbering, instead: str) -> Binding:
    """The rule of a parameter, bound to its name.

    Args:
        name: the name of the parameter in a ``GPTModel`` of the whole model, without wrappers.
        mapping, numbering: of the model.
        instead: a function or class that exports models whose parameters cannot be passed alone.

    Raises:
        ConfigError: the parameter is one of an adapter, or one that only a ``HybridModel`` has. In such a model, the
            number in a name is not the number of an HF layer.
    """
    if is_adapter(name):
        raise ConfigError(
            f"{name} belongs to an adapter, which cannot be handed over with its weight: expected a model without "
            f"adapters. {instead} with merged=True has the merged weights"
        )
    num_layers = len(numbering.layers)
    if FINAL_NORM.match(name) or (layer_of(name) or 0) >= num_layers:
        raise ConfigError(
            f'{name} is a parameter of a HybridModel, whose layers are halves: expected the names of a model="gpt", '
            f"with {num_layers} layers. Build that, or export by {instead}"
        )
    return mapping.bind(canonical(name, numbering))
