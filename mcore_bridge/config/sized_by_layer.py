"""A ``TransformerConfig`` whose layers have sizes of their own, as megatron-core's ``TransformerBlock`` asks for them.

With ``heterogeneous_block_specs`` the block builds each layer from ``get_config_for_layer``, and names the layers apart
in checkpoints. megatron-core's ``HeterogeneousTransformerConfig`` can change only KV heads and the size of MLPs.
"""

from megatron.core.transformer import TransformerConfig

from mcore_bridge.config.layer_sizes import layer_config


class SizedByLayerConfig(TransformerConfig):
    """A config with the attribute ``per_layer_config``."""

    def get_config_for_layer(self, layer_number: int) -> TransformerConfig:
        """The config of a layer, which megatron-core numbers from 1."""
        return layer_config(self, layer_number - 1)
