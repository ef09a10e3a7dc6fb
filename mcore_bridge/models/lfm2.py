"""LFM2: a short convolution or attention with norms of queries and keys in each layer, and an MLP."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.tables import DENSE, but
from mcore_bridge.config.tables.short_convolutions import CONVOLUTIONS, LAYERS, MLP_SIZE, TIED
from mcore_bridge.models.blocks import EMBEDDING
from mcore_bridge.models.blocks_conv import CONV_LAYER, CONV_MLP, CONV_NORM
from mcore_bridge.rules.mapping import under

ARCHITECTURE = Architecture(
    model_type="lfm2",
    fields=but(DENSE, *CONVOLUTIONS, LAYERS, MLP_SIZE, TIED),
    rules=lambda hf: (*EMBEDDING, *under("decoder.layers.*", "model.layers.*", CONV_LAYER, CONV_MLP), *CONV_NORM),
)
